#include "quantize_blocks.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "base/cpu_topology.h"
#include "base/log.h"
#include "eval/eval_window.h"
#include "flag_checks.h"
#include "model/model.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/nearest.h"
#include "quantizer/digest.h"
#include "quantizer/model_files.h"
#include "text/tokenizer.h"
#include "variant_meter.h"

namespace nibble {
namespace {

constexpr double kShareStep = 1.0 / 128;  // to which --max-kld finds a share

struct MaxKld {
  double share = 0;
  double kld = 0;
};

/// Parts of a run that measures divergences.
struct Measuring {
  const QuantizeFlags& flags;
  const CheckpointReader& reader;
  const QuantizePlan& plan;
  const ModelConfig& config;
  const CalibrationText& text;
  const FoundBlocks& found;
  int threads;
};

/// Finds the least share of 8-bit blocks whose divergence is small enough.
class ShareSearch final {
 public:
  explicit ShareSearch(const Measuring& of) : of_(of), pool_(of.threads) {}

  Result<MaxKld> run() {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<EvalWindow> windows, held_out());
    ModelFlags model;
    model.model_dir = of_.flags.options.source;
    model.threads = of_.threads;
    model.device = "cpu";
    NIBBLE_ASSIGN_OR_RETURN(meter_, VariantMeter::open(model, std::move(windows), pool_));
    const double most = of_.flags.blocks.max_kld;
    MaxKld high{.share = 1};
    NIBBLE_ASSIGN_OR_RETURN(high.kld, measure(1));
    if (high.kld > most) {
      return make_error(StatusCode::kInvalidArgument,
                        "--max-kld {}: with all blocks in 8 bits the divergence is {:.4f} already, "
                        "by the weights; give more, smaller blocks, or another scheme",
                        most, high.kld);
    }
    MaxKld low;
    NIBBLE_ASSIGN_OR_RETURN(low.kld, measure(0));
    if (low.kld <= most) {
      return low;
    }
    while (high.share - low.share > kShareStep) {
      MaxKld middle{.share = (low.share + high.share) / 2};
      NIBBLE_ASSIGN_OR_RETURN(middle.kld, measure(middle.share));
      (middle.kld <= most ? high : low) = middle;
    }
    return high;
  }

 private:
  /// Windows of --text, or of the calibration text those that the model is not calibrated with.
  Result<std::vector<EvalWindow>> held_out() const {
    const QuantizeFlags& flags = of_.flags;
    const std::string& other = flags.judged.kld_text;
    CalibrationTextOptions options = flags.text;
    options.path = other.empty() ? flags.text.path : other;
    constexpr int64_t kAll = int64_t{1} << 40;
    options.windows = kAll;
    NIBBLE_ASSIGN_OR_RETURN(CalibrationText all,
                            read_model_text(flags.options.source, of_.config, options));
    const std::set<std::vector<int32_t>> seen(of_.text.windows.begin(), of_.text.windows.end());
    std::vector<EvalWindow> windows;
    int64_t tokens = 0;
    for (std::vector<int32_t>& window : all.windows) {
      if (tokens < flags.judged.measure_tokens && !seen.contains(window)) {
        windows.push_back({.tokens = std::move(window), .first_scored = 1});
        tokens += windows.back().scored();
      }
    }
    if (windows.empty()) {
      return make_error(
          StatusCode::kInvalidArgument,
          "--max-kld: {} has no tokens beside those of the calibration; give a longer "
          "text, fewer --calibration-windows, or another one with --text FILE",
          options.path);
    }
    return windows;
  }

  Result<double> measure(double share) {
    const SiteActs acts = of_.found.acts(of_.found.ranking.choose(share));
    const LayerJobs jobs(of_.plan, of_.config);
    std::vector<ReplacedWeights> replaced;
    for (const FoundSite& site : of_.found.sites) {
      for (const size_t index : jobs.readers(site.input)) {
        const PlanJob& job = of_.plan.jobs[index];
        NIBBLE_ASSIGN_OR_RETURN(PlainMatrix matrix, read_matrix(*job.matrix, &of_.reader));
        if (site.columns != nullptr) {
          order_channels(*site.columns, {matrix.w.data(), matrix.n, matrix.k}, pool_);
        }
        NIBBLE_ASSIGN_OR_RETURN(
            QuantTensor codes,
            nearest_codes(matrix, job.scheme, Dialect::kCompressedTensors, pool_));
        replaced.push_back(
            {.module = job.name(), .weight = std::move(codes), .act = *acts.find(site.input)});
      }
    }
    NIBBLE_ASSIGN_OR_RETURN(const DivergenceResult result, meter_->measure(std::move(replaced)));
    NIBBLE_LOG(kInfo, "8-bit blocks in a share of {:.4f}: divergence {:.4f}", share,
               result.kl.mean);
    return result.kl.mean;
  }

  const Measuring& of_;
  ThreadPool pool_;
  std::unique_ptr<VariantMeter> meter_;
};

/// Hash of all that was chosen.
std::string digest_of_choice(const FoundBlocks& found, const BlockChoice& choice) {
  std::string text;
  for (size_t i = 0; i < found.sites.size(); ++i) {
    const FoundSite& site = found.sites[i];
    text += fmt::format("{} {} {} {}", site.input.layer, static_cast<int>(site.input.site),
                        site.input.expert, choice.sites[i].clip);
    text.append(choice.sites[i].bits.begin(), choice.sites[i].bits.end());
    for (size_t c = 0; site.columns != nullptr && c < site.columns->size(); ++c) {
      text += fmt::format(" {}", (*site.columns)[c]);
    }
  }
  return digest_text(digest_of(text));
}

Status check_share(const FoundBlocks& found, const BlockFlags& flags) {
  const double least = found.ranking.least_share();
  if (flags.max_kld > 0 || flags.a8_share == 0 || flags.a8_share + 1e-9 >= least) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument,
                    "--a8-share {}: cannot be reached, as the least that gives any block 8 bits is "
                    "{:.5f}; give that, 0, or a smaller --block",
                    flags.a8_share, least);
}

void note_choice(const FoundBlocks& found, const BlockChoice& choice, BlockFlags& flags) {
  int64_t blocks = 0;
  int64_t eight = 0;
  for (const SiteBlocks& site : choice.sites) {
    blocks += std::ssize(site.bits);
    eight += std::ranges::count(site.bits, uint8_t{8});
  }
  flags.chosen.set("a4_share", 1 - choice.a8_share);
  flags.chosen.set("blocks", blocks);
  flags.chosen.set("blocks_of_8_bits", eight);
  flags.chosen.set("digest", digest_of_choice(found, choice));
  flags.summary =
      fmt::format("W4A4: {:.2f} % of multiply-adds; {} of {} blocks have 8-bit activations\n",
                  100 * (1 - choice.a8_share), eight, blocks);
}

}  // namespace

bool in_blocks(const QuantizeFlags& flags) {
  return flags.options.plan.rules.scheme.act == ActFormat::kIntBlocks;
}

ExpectedBlocks expected_blocks(const QuantizeFlags& flags) {
  return {.block = flags.blocks.block, .a8_share = flags.blocks.a8_share};
}

void add_block_flags(CLI::App& command, QuantizeFlags& flags) {
  BlockFlags& blocks = flags.blocks;
  command
      .add_option("--block", blocks.block,
                  "Of schemes with activations in blocks of 4 and 8 bits: channels of a block")
      ->check(CLI::IsMember({32, 64, 128}))
      ->default_str("the scheme's");
  command
      .add_option("--a8-share", blocks.a8_share,
                  "Share of multiply-adds that may take 8-bit blocks; the rest is W4A4")
      ->check(number_between(0.0, 1.0))
      ->capture_default_str();
  command
      .add_option("--max-kld", blocks.max_kld,
                  "Instead of --a8-share: the least share whose KL divergence from the model, with "
                  "the nearest codes, is at most this on text that it was not calibrated with "
                  "(--text, or what --calibrate has left)")
      ->check(positive_number());
  command
      .add_option("--permute", blocks.permute,
                  "How channels that need 8 bits become neighbours: fold, in the weights alone; "
                  "gather, in an order of each input's own, which other programs cannot read; or "
                  "none")
      ->check(CLI::IsMember({"fold", "gather", "none"}))
      ->capture_default_str();
}

Status settle_blocks(QuantizeFlags& flags) {
  if (!in_blocks(flags)) {
    for (const char* flag : {"--block", "--a8-share", "--max-kld", "--permute"}) {
      if (flag_given(flags, flag)) {
        return make_error(StatusCode::kInvalidArgument,
                          "{}: goes with a scheme whose activations are in blocks of 4 and 8 bits",
                          flag);
      }
    }
    return {};
  }
  BlockFlags& blocks = flags.blocks;
  if (flag_given(flags, "--max-kld") && flag_given(flags, "--a8-share")) {
    return make_error(StatusCode::kInvalidArgument,
                      "--a8-share and --max-kld: each decides how many blocks have 8 bits; leave "
                      "one of them out");
  }
  if (flags.backend.device != "cpu") {
    return make_error(StatusCode::kUnsupported,
                      "--device {}: blocks of activations are chosen on the CPU; leave it out",
                      flags.backend.device);
  }
  QuantScheme& scheme = flags.options.plan.rules.scheme;
  if (scheme.weight.grouped() && blocks.block != 0) {
    WeightFormat weight = scheme.weight;
    weight.group_size = blocks.block;
    const std::string_view name = scheme_name(weight, scheme.act);
    NIBBLE_ASSIGN_OR_RETURN(scheme, find_scheme(name));
    flags.scheme = name;
  }
  constexpr int kUsual = 128;  // the paper's
  if (blocks.block == 0) {
    blocks.block = scheme.weight.grouped() ? scheme.weight.group_size : kUsual;
  }
  if (!flags.text.path.empty()) {
    flags.options.plan.calibration = Json::object({{"blocks", blocks.block}});
  }
  return {};
}

Result<SiteActs> choose_blocks(QuantizeFlags& flags) {
  const QuantizeOptions& options = flags.options;
  const int threads = options.threads > 0 ? options.threads : usable_cores();
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const Json json, read_config(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const QuantizePlan plan, make_plan(reader, json, options.plan));
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const CalibrationText text,
                          read_model_text(options.source, config, flags.text));
  BlockFlags& blocks = flags.blocks;
  const bool gather = blocks.permute == "gather";
  NIBBLE_ASSIGN_OR_RETURN(
      const FoundBlocks found,
      find_blocks({.model = options.source,
                   .reader = reader,
                   .plan = plan,
                   .windows = text.windows,
                   .moves = gather ? ChannelMoves::kGather : ChannelMoves::kNone,
                   .block = blocks.block,
                   .a8_share = blocks.a8_share,
                   .beside = options.destination,
                   .threads = threads,
                   .stop = options.stop}));
  NIBBLE_RETURN_IF_ERROR(check_share(found, blocks));
  double share = blocks.a8_share;
  blocks.chosen = Json::object({{"block", blocks.block}, {"permute", blocks.permute}});
  if (blocks.max_kld > 0) {
    NIBBLE_ASSIGN_OR_RETURN(const MaxKld least,
                            ShareSearch({flags, reader, plan, config, text, found, threads}).run());
    share = least.share;
    blocks.chosen.set("max_kld", blocks.max_kld);
    blocks.chosen.set("kld", least.kld);
  } else {
    blocks.chosen.set("a8_share", blocks.a8_share);
  }
  blocks.parts = found.parts;
  const BlockChoice choice = found.ranking.choose(share);
  note_choice(found, choice, blocks);
  return found.acts(choice);
}

}  // namespace nibble
