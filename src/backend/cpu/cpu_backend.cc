#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "backend/backend.h"
#include "backend/cpu/cpu_attention.h"
#include "backend/cpu/cpu_experts.h"
#include "backend/cpu/cpu_heads.h"
#include "backend/cpu/cpu_step.h"
#include "backend/cpu/cpu_table.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/kv_rows.h"
#include "backend/cpu/registry.h"
#include "backend/kernel_choice.h"
#include "base/log.h"

namespace nibble {
namespace cpu {
namespace {

constexpr int64_t kRoundedPiece = 4096;  // elements of one task of round_bf16()

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& kernels, const ThreadPlan& plan, bool exact)
      : kernels_(kernels),
        name_(fmt::format("cpu/{}", kernels.name)),
        pool_(plan),
        products_{.kernels = kernels, .arena = weights_, .workspace = workspace_, .exact = exact} {}

  /// kInvalidArgument for a name in `kernels` that there is no kernel of.
  Status start(std::span<const std::string> kernels) {
    KernelChoice::Registry registry{.device = name_,
                                    .accepts = [this](size_t entry, const GemmProblem& problem) {
                                      return gemm_entries()[entry].accepts(problem, products_);
                                    }};
    for (const GemmEntry& entry : gemm_entries()) {
      registry.names.push_back(fmt::format("{}_{}", entry.name, kernels_.name));
    }
    NIBBLE_ASSIGN_OR_RETURN(choice_, KernelChoice::create(std::move(registry), kernels));
    return attention_.allocate_scratch();
  }

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] int threads() const override { return pool_.threads(); }

  [[nodiscard]] Status check_kv(const KvView& shape, int64_t heads) const override {
    return cpu::check_kv(shape, heads);
  }

  [[nodiscard]] int64_t step_bytes(const StepLimits& limits) const override {
    return CpuAttention::latent_bytes(limits, pool_.threads()) +
           (limits.latent_heads == 0
                ? 0
                : CpuHeads::workspace_bytes(limits.latent_heads, limits.latent_row, limits.rows));
  }

  [[nodiscard]] Status check_gemm(const WeightFormat& format,
                                  const ActSpec& act,
                                  int64_t k) const override {
    const GemmProblem problem{.weight = format, .act = act.format, .n = kTileRows, .k = k};
    return choice_->choose(problem) ? Status() : refuse_product(problem, products_);
  }

  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView> parts,
                                                     const ActSpec& act,
                                                     int64_t max_m) override {
    GemmProblem problem{.weight = parts.front().format, .act = act.format, .k = parts.front().k};
    for (const QuantView& part : parts) {
      problem.n += part.n;
    }
    const auto entry = choice_->choose(problem);
    if (!entry) {
      return refuse_product(problem, products_);
    }
    NIBBLE_RETURN_IF_ERROR(check_spec(parts.front(), act));
    choice_->count(*entry, problem);
    return gemm_entries()[*entry].make(
        {.parts = parts, .problem = problem, .act = act, .max_m = max_m}, products_);
  }

  Result<std::unique_ptr<PreparedHeads>> prepare_heads(std::span<const QuantView> heads,
                                                       const ActSpec& act,
                                                       int64_t max_m) override {
    NIBBLE_ASSIGN_OR_RETURN(const TiledProduct* product,
                            tiled_product(heads.front(), heads.front().n, act));
    return CpuHeads::create({.heads = heads, .act = act, .max_m = max_m}, *product, products_);
  }

  Result<std::unique_ptr<PreparedExperts>> prepare_experts(const ExpertsRequest& request) override {
    NIBBLE_RETURN_IF_ERROR(check_experts(request));
    const ExpertsRequest::Expert& first = request.experts.front();
    NIBBLE_ASSIGN_OR_RETURN(const TiledProduct* gate_up,
                            tiled_product(first.gate, 2 * first.gate.n, request.form.act));
    NIBBLE_ASSIGN_OR_RETURN(const TiledProduct* down,
                            tiled_product(first.down, first.down.n, request.form.down_act_of(0)));
    for (size_t i = 0; i < request.form.down_acts.size(); ++i) {
      NIBBLE_RETURN_IF_ERROR(check_spec(request.experts[i].down, request.form.down_acts[i]));
    }
    const ActFormat act = request.between == DType::kBF16 ? ActFormat::kBf16 : ActFormat::kFloat;
    NIBBLE_ASSIGN_OR_RETURN(auto router, prepare_gemm({&request.router, 1}, act, request.max_m));
    return CpuExperts::create(request,
                              {.router = std::move(router), .gate_up = *gate_up, .down = *down},
                              products_, experts_);
  }

  [[nodiscard]] ExpertCounts expert_counts() const override { return experts_.counts(); }

  Result<std::unique_ptr<PreparedTable>> prepare_table(const QuantView& table,
                                                       std::shared_ptr<const void> owner) override {
    return std::unique_ptr<PreparedTable>(std::make_unique<CpuTable>(table, std::move(owner)));
  }

  Status prepare_steps(const StepLimits& /*limits*/) override { return choice_->finish(); }

  void round_bf16(float* x, int64_t count) override {
    const int64_t pieces = (count + kRoundedPiece - 1) / kRoundedPiece;
    for_rows(pool_, pieces, kRoundedPiece, [&](int64_t piece, int) {
      const int64_t begin = piece * kRoundedPiece;
      kernels_.round_bf16(x + begin, std::min(kRoundedPiece, count - begin), x + begin);
    });
  }

  void run_step(const StepPlan& plan, const StepLayers& layers) override {
    CpuStep step(plan, {kernels_, workspace_, attention_});
    layers(step);
  }

 private:
  /// The product that a matrix of an expert, or of a head, takes.
  Result<const TiledProduct*> tiled_product(const QuantView& weight,
                                            int64_t n,
                                            const ActSpec& act) {
    const GemmProblem problem{.weight = weight.format, .act = act.format, .n = n, .k = weight.k};
    const auto entry = choice_->choose(problem);
    if (!entry || gemm_entries()[*entry].tiled == nullptr) {
      return refuse_product(problem, products_).with_context(weight.name);
    }
    NIBBLE_RETURN_IF_ERROR(check_spec(weight, act));
    choice_->count(*entry, problem);
    return gemm_entries()[*entry].tiled;
  }

  /// Rows in blocks come with their blocks.
  static Status check_spec(const QuantView& weight, const ActSpec& act) {
    if (!in_blocks(act.format)) {
      return {};
    }
    CHECK_MSG(act.blocks != nullptr, "{}: activations in blocks without blocks", weight.name);
    return check_blocks(*act.blocks, act.format, weight.format, weight.k).with_context(weight.name);
  }

  const KernelTable& kernels_;
  std::string name_;
  ThreadPool pool_;
  BufferArena weights_;
  Workspace workspace_{pool_};
  CpuAttention attention_{kernels_, pool_};
  GemmDevice products_;
  ExpertWorkspace experts_;
  std::optional<KernelChoice> choice_;
};

}  // namespace
}  // namespace cpu

namespace {

ThreadPlan plan_of(const CpuBackendOptions& options) {
  const CpuTopology topology = read_cpu_topology();
  ThreadOptions wanted{
      .threads = options.threads, .pinning = options.pinning, .numa = options.numa};
  const int most = topology.usable_cpus();
  if (options.limit == ThreadLimit::kUsableCpus && wanted.threads > most) {
    NIBBLE_LOG(kWarning, "{} threads were asked for, but this process may use {} CPUs{}: taking {}",
               wanted.threads, most,
               topology.quota == most ? " (the quota of its control group)" : "", most);
    wanted.threads = most;
  }
  return plan_threads(topology, wanted);
}

}  // namespace

Result<std::unique_ptr<Backend>> make_cpu_backend(const CpuBackendOptions& options) {
  if (options.threads < 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "threads is {}; give 0 for all cores, or a count", options.threads);
  }
  const cpu::CpuFeatures features = cpu::detect_cpu_features();
  NIBBLE_ASSIGN_OR_RETURN(const auto* kernels, cpu::find_kernels(options.isa, features));
  if (options.isa == "auto") {
    cpu::log_missing(features, kernels->name);
  }
  auto backend =
      std::make_unique<cpu::CpuBackend>(*kernels, plan_of(options), options.exact_activations);
  NIBBLE_RETURN_IF_ERROR(backend->start(options.kernels));
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace nibble
