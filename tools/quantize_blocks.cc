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

/// How what is chosen is called where blocks have these precisions.
struct ShareNames {
  const char* flag;    // the share that is wanted
  const char* wanted;  // of recipe and report
  const char* more;    // what blocks have that are chosen
};

ShareNames names_of(const QuantizeFlags& flags) {
  return flags.options.plan.rules.scheme.act == ActFormat::kBf16Blocks
             ? ShareNames{"--outlier-share", "outlier_share", "BF16"}
             : ShareNames{"--a8-share", "a8_share", "8 bits"};
}

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

/// Finds the least share of blocks of the more bits whose divergence is small enough.
class ShareSearch final {
 public:
  explicit ShareSearch(const Measuring& of) : pool_(of.threads), of_(of) {}

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
                        "--max-kld {}: with all blocks in {} the divergence is {:.4f} already, by "
                        "the weights; give more, smaller blocks, or another scheme",
                        most, names_of(of_.flags).more, high.kld);
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
    NIBBLE_LOG(kInfo, "blocks with {} in a share of {:.4f}: divergence {:.4f}",
               names_of(of_.flags).more, share, result.kl.mean);
    return result.kl.mean;
  }

  ThreadPool pool_;
  const Measuring& of_;
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

Status check_share(const FoundBlocks& found, const QuantizeFlags& flags) {
  const BlockFlags& blocks = flags.blocks;
  const double least = found.ranking.least_share();
  if (blocks.max_kld > 0 || blocks.outlier_share == 0 || blocks.outlier_share + 1e-9 >= least) {
    return {};
  }
  const ShareNames names = names_of(flags);
  return make_error(
      StatusCode::kInvalidArgument,
      "{} {}: cannot be reached, as the least that gives any block {} is {:.5f}; give "
      "that, 0, or a smaller --block",
      names.flag, blocks.outlier_share, names.more, least);
}

void note_choice(const FoundBlocks& found, const BlockChoice& choice, BlockFlags& flags) {
  const bool to_bf16 = found.act == ActFormat::kBf16Blocks;
  int64_t blocks = 0;
  int64_t more = 0;
  for (const SiteBlocks& site : choice.sites) {
    blocks += std::ssize(site.bits);
    more += std::ranges::count(site.bits, to_bf16 ? 16 : 8);
  }
  const double share = to_bf16 ? choice.outlier_share : 1 - choice.outlier_share;
  flags.chosen.set(to_bf16 ? "bf16_share" : "a4_share", share);
  flags.chosen.set("blocks", blocks);
  flags.chosen.set(to_bf16 ? "blocks_in_bf16" : "blocks_of_8_bits", more);
  flags.chosen.set("digest", digest_of_choice(found, choice));
  flags.summary =
      fmt::format("{}: {:.2f} % of multiply-adds; {} of {} blocks have {} activations\n",
                  to_bf16 ? "BF16" : "W4A4", 100 * share, more, blocks, to_bf16 ? "BF16" : "8-bit");
}

}  // namespace

bool in_blocks(const QuantizeFlags& flags) {
  return in_blocks(flags.options.plan.rules.scheme.act);
}

ExpectedBlocks expected_blocks(const QuantizeFlags& flags) {
  return {.block = flags.blocks.block, .outlier_share = flags.blocks.outlier_share};
}

void add_block_flags(CLI::App& command, QuantizeFlags& flags) {
  BlockFlags& blocks = flags.blocks;
  command
      .add_option("--block", blocks.block,
                  "Of schemes with activations in blocks of two precisions: channels of a block")
      ->check(CLI::IsMember({32, 64, 128}))
      ->default_str("the scheme's");
  command
      .add_option("--a8-share,--outlier-share", blocks.outlier_share,
                  "Share of multiply-adds that may take blocks of the more bits: 8 beside 4 (the "
                  "rest is W4A4), or BF16 beside 8")
      ->check(number_between(0.0, 1.0))
      ->capture_default_str();
  command
      .add_option(
          "--max-kld", blocks.max_kld,
          "Instead of --outlier-share: the least share whose KL divergence from the model, with "
          "the nearest codes, is at most this on text that it was not calibrated with "
          "(--text, or what --calibrate has left)")
      ->check(positive_number());
  command
      .add_option("--permute", blocks.permute,
                  "How channels that need more bits become neighbours: fold, in the weights alone; "
                  "gather, in an order of each input's own, which other programs cannot read; or "
                  "none")
      ->check(CLI::IsMember({"fold", "gather", "none"}))
      ->capture_default_str();
}

Status settle_blocks(QuantizeFlags& flags) {
  if (!in_blocks(flags)) {
    for (const char* flag : {"--block", "--outlier-share", "--max-kld", "--permute"}) {
      if (flag_given(flags, flag)) {
        return make_error(
            StatusCode::kInvalidArgument,
            "{}: goes with a scheme whose activations are in blocks of two precisions", flag);
      }
    }
    return {};
  }
  BlockFlags& blocks = flags.blocks;
  if (flag_given(flags, "--max-kld") && flag_given(flags, "--outlier-share")) {
    const ShareNames names = names_of(flags);
    return make_error(
        StatusCode::kInvalidArgument,
        "{} and --max-kld: each decides how many blocks have {}; leave one of them out", names.flag,
        names.more);
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
                   .act = options.plan.rules.scheme.act,
                   .outlier_share = blocks.outlier_share,
                   .beside = options.destination,
                   .threads = threads,
                   .stop = options.stop}));
  NIBBLE_RETURN_IF_ERROR(check_share(found, flags));
  double share = blocks.outlier_share;
  blocks.chosen = Json::object({{"block", blocks.block}, {"permute", blocks.permute}});
  if (blocks.max_kld > 0) {
    NIBBLE_ASSIGN_OR_RETURN(const MaxKld least,
                            ShareSearch({flags, reader, plan, config, text, found, threads}).run());
    share = least.share;
    blocks.chosen.set("max_kld", blocks.max_kld);
    blocks.chosen.set("kld", least.kld);
  } else {
    blocks.chosen.set(names_of(flags).wanted, blocks.outlier_share);
  }
  blocks.parts = found.parts;
  const BlockChoice choice = found.ranking.choose(share);
  note_choice(found, choice, blocks);
  return found.acts(choice);
}

}  // namespace nibble
