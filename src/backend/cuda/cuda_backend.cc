#include "backend/cuda/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "backend/cuda/calibration/cuda_calibration.h"
#include "backend/cuda/cuda_experts.h"
#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/cuda_heads.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/cuda_steps.h"
#include "backend/cuda/cuda_table.h"
#include "backend/cuda/load_times.h"
#include "backend/cuda/row_kernels.h"
#include "backend/cuda/self_check.h"
#include "backend/cuda/step_branch.h"
#include "backend/kernel_choice.h"
#include "base/check.h"
#include "base/log.h"

namespace nibble {
namespace cuda {
namespace {

/// Sliding window of the self-test: within its sequence, as a model's own seldom is.
constexpr int32_t kCheckedWindow = 50;
/// Most rows of its products: more of them are more of the same tiles.
constexpr int64_t kMostCheckedRows = 1024;

std::string_view name_of(ActFormat act) {
  switch (act) {
    case ActFormat::kFloat:
    case ActFormat::kBf16:
      return "BF16";
    case ActFormat::kInt8Token:
      return "INT8";
    case ActFormat::kIntBlocks:
      return "INT4 and INT8";
    case ActFormat::kBf16Blocks:
      return "INT8 and BF16";
    case ActFormat::kFp8Token:
    case ActFormat::kFp8Group:
      return "FP8";
  }
  return "";
}

Status refuse_product(const GemmProblem& problem, const DeviceInfo& device) {
  const std::string_view scheme = scheme_name(
      problem.weight, problem.act == ActFormat::kBf16 ? ActFormat::kFloat : problem.act);
  return make_error(
      StatusCode::kUnsupported,
      "no CUDA kernel for weights [{}, {}] in {} with {} activations on {} (sm_{}{}); "
      "quantize with --scheme to another scheme or use --device cpu",
      problem.n, problem.k, scheme.empty() ? "this format" : scheme, name_of(problem.act),
      device.name, device.major, device.minor);
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(DeviceInfo device, CudaBackendOptions options, std::span<const GemmEntry> entries)
      : device_(std::move(device)),
        options_(std::move(options)),
        entries_(entries),
        name_(fmt::format("cuda:{}/{}", device_.index, device_.name)) {}
  ~CudaBackend() override {
    if (stream_ != nullptr) {
      cudaStreamSynchronize(stream_);
      steps_.reset();
      branch_.reset();
      cudaStreamDestroy(stream_);
    }
  }

  Status start() {
    const Status chosen = check(cudaSetDevice(device_.index), "choosing the GPU");
    if (chosen.code() == StatusCode::kResourceExhausted) {
      return make_error(chosen.code(),
                        "{}: {} has not even the memory to begin: end what else uses it (see "
                        "nvidia-smi), or use --device cpu",
                        chosen.message(), name_);
    }
    NIBBLE_RETURN_IF_ERROR(chosen);
    NIBBLE_RETURN_IF_ERROR(check_capability(device_, probe_device_code()));
    NIBBLE_RETURN_IF_ERROR(take_kernels());
    NIBBLE_RETURN_IF_ERROR(
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"));
    const auto place =
        options_.branch_steps ? StepBranch::Place::kBeside : StepBranch::Place::kOneStream;
    branch_ = std::make_unique<StepBranch>(device_, stream_, place);
    self_check_ = std::make_unique<SelfCheck>(stream_);
    NIBBLE_ASSIGN_OR_RETURN(Uploader uploader, Uploader::create(stream_, options_.copy));
    uploader_ = std::make_unique<Uploader>(std::move(uploader));
    return {};
  }

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] int threads() const override { return 1; }
  [[nodiscard]] DType activation_type(DType /*model*/) const override { return DType::kBF16; }
  [[nodiscard]] bool host_memory() const override { return false; }
  [[nodiscard]] int64_t free_memory() const override {
    return static_cast<int64_t>(free_device_memory());
  }

  Result<DeviceBuffer> allocate(size_t bytes) override {
    return allocate_device(bytes, "the model's memory");
  }

  Result<DeviceBuffer> upload(std::span<const float> values) override {
    NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer buffer, allocate_device(values.size_bytes(), "a vector"));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(buffer.as<void>(), values.data(), values.size_bytes()));
    return buffer;
  }

  void read(const float* from, std::span<float> to) override {
    must(cudaMemcpyAsync(to.data(), from, to.size_bytes(), cudaMemcpyDeviceToHost, stream_),
         "copying logits");
    must(cudaStreamSynchronize(stream_), "a step");
    if (steps_ != nullptr) {
      steps_->report_ranges();
    }
  }

  [[nodiscard]] int64_t kv_page_bytes(const KvView& shape) const override {
    return shape.latent() ? latent_page_bytes(latent_shape_of(shape))
                          : page_bytes(layout_of(shape));
  }

  [[nodiscard]] int64_t preferred_page_size(KvCode code) const override {
    return cuda::preferred_page_size(code);
  }

  [[nodiscard]] Status check_kv(const KvView& shape, int64_t heads) const override {
    if (shape.latent()) {
      return check_latent_kv(shape, heads);
    }
    AttentionShape attention{
        .kv = layout_of(shape),
        .heads = static_cast<int32_t>(heads),
        .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim)))};
    NIBBLE_RETURN_IF_ERROR(check_attention(attention));
    NIBBLE_RETURN_IF_ERROR(self_check_->check_attention(attention));
    attention.sliding_window = kCheckedWindow;
    NIBBLE_RETURN_IF_ERROR(self_check_->check_attention(attention));
    attention.form = AttentionForm::kShared;
    return shape.code == KvCode::kBf16 ? self_check_->check_attention(attention) : Status();
  }

  Result<std::unique_ptr<PreparedTable>> prepare_table(
      const QuantView& table, std::shared_ptr<const void> /*owner*/) override {
    const WeightCode code = table.format.code;
    const DType dtype = code == WeightCode::kBf16  ? DType::kBF16
                        : code == WeightCode::kF16 ? DType::kF16
                                                   : DType::kF32;
    CHECK_EQ(table.row_stride, 0);
    vocab_ = std::max(vocab_, table.n);
    const auto bytes = static_cast<size_t>(table.n * table.row_bytes());
    std::shared_ptr<const DeviceBuffer> memory = matrices_[table.codes].lock();
    matrices_.clear();  // other files may come to the same place
    if (memory == nullptr || memory->size() != bytes) {
      NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer copy, times_.prepare(uploader_->spent(), [&] {
        return allocate_device(bytes, "the embedding");
      }));
      NIBBLE_RETURN_IF_ERROR(uploader_->upload(table.codes, bytes, copy.as<void>()));
      NIBBLE_RETURN_IF_ERROR(wait_for("copying the embedding"));
      memory = std::make_shared<const DeviceBuffer>(std::move(copy));
    }
    return std::unique_ptr<PreparedTable>(
        std::make_unique<CudaTable>(table, std::move(memory), dtype, stream_));
  }

  [[nodiscard]] Status check_turn(int64_t turn, int64_t k) const override {
    if (turn == 0) {
      return {};
    }
    const int64_t most = most_turned();
    if (k > most || !row_width_ok(k)) {
      return make_error(
          StatusCode::kUnsupported,
          "{} turns rows of at most {} activations, and of a multiple of 8, not of {}; use "
          "--device cpu, or quantize without --online-rotation",
          device_.name, most, k);
    }
    return self_check_->check_turned(turn, k);
  }

  [[nodiscard]] Status check_gemm(const WeightFormat& format,
                                  const ActSpec& act,
                                  int64_t k) const override {
    NIBBLE_RETURN_IF_ERROR(check_spec(act));
    const GemmProblem problem{device_format(format), product_type(act.format), 128, k};
    return choice_->choose(problem) ? Status() : refuse_product(problem, device_);
  }

  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView> parts,
                                                     const ActSpec& act,
                                                     int64_t max_m) override {
    NIBBLE_ASSIGN_OR_RETURN(auto blocks, blocks_of(parts.front(), act));
    NIBBLE_ASSIGN_OR_RETURN(auto packed, pack(parts, act, {.max_m = max_m}));
    auto gemm = std::make_unique<CudaGemm>(packed, max_m, gemm_context(), std::move(blocks));
    NIBBLE_RETURN_IF_ERROR(check_packed(*gemm, parts, with_type(act)));
    if (parts.size() == 1 && parts.front().format.code == packed->problem().weight.code) {
      matrices_[parts.front().codes] = gemm->codes();
    }
    return std::unique_ptr<PreparedGemm>(std::move(gemm));
  }

  Result<std::unique_ptr<PreparedHeads>> prepare_heads(std::span<const QuantView> heads,
                                                       const ActSpec& act,
                                                       int64_t max_m) override {
    if (!CudaHeads::takes(heads)) {
      return Backend::prepare_heads(heads, act, max_m);
    }
    return times_.prepare(uploader_->spent(),
                          [&] { return CudaHeads::create(heads, gemm_context()); });
  }

  Result<std::unique_ptr<PreparedExperts>> prepare_experts(const ExpertsRequest& request) override {
    NIBBLE_RETURN_IF_ERROR(check_experts(request));
    NIBBLE_RETURN_IF_ERROR(check_rows_of(request.form));
    std::vector<QuantView> gate_up;
    std::vector<QuantView> down;
    for (const ExpertsRequest::Expert& expert : request.experts) {
      gate_up.insert(gate_up.end(), {expert.gate, expert.up});
      down.push_back(expert.down);
    }
    const PackedFor how{.max_m = request.max_m, .experts = std::ssize(request.experts)};
    const ExpertsForm& form = request.form;
    const std::span<const ActSpec> down_acts =
        form.down_acts.empty() ? std::span(&form.down_act, 1) : std::span(form.down_acts);
    CudaExperts::Parts parts;
    NIBBLE_ASSIGN_OR_RETURN(parts.gate_up, pack_part(gate_up, {&form.act, 1}, how));
    NIBBLE_ASSIGN_OR_RETURN(parts.down, pack_part(down, down_acts, how));
    // The first expert of a layer is checked on its own weights; the others take the same kernels.
    const std::span<const QuantView> both(gate_up);
    NIBBLE_RETURN_IF_ERROR(check_first(parts.gate_up, both.first(2), form.act, request.max_m));
    NIBBLE_RETURN_IF_ERROR(
        check_first(parts.down, std::span(down).first(1), down_acts.front(), request.max_m));
    auto experts = CudaExperts::create(request, std::move(parts), gemm_context(), experts_);
    recordable_ = recordable_ && (!experts.ok() || (*experts)->recordable());
    return experts;
  }

  [[nodiscard]] ExpertCounts expert_counts() const override {
    ExpertCounts counts;
    if (experts_.counts.size() > 0) {
      must(cudaMemcpyAsync(&counts, experts_.counts.as<void>(), sizeof(counts),
                           cudaMemcpyDeviceToHost, stream_),
           "copying counts of experts");
      must(cudaStreamSynchronize(stream_), "a step");
    }
    return counts;
  }

  [[nodiscard]] int64_t step_bytes(const StepLimits& limits) const override {
    // Rounded rows of BF16 and as much again for the workspaces of products; scaled frequencies.
    return limits.rows * 4 * (limits.input_width + limits.scaled_pairs) +
           limits.rows *
               ExpertScratch::row_bytes(limits.top_k, limits.hidden, limits.expert_width) +
           StepBranch::bytes(limits) + LatentPlans::bytes(limits) +
           ExpandedLatents::bytes(ExpandedLatents::sizes(limits));
  }

  Status prepare_steps(const StepLimits& limits) override {
    NIBBLE_RETURN_IF_ERROR(choice_->finish());
    scratch_.release_stage();
    using Recording = CudaSteps::Recording;
    const bool records = options_.record_steps && recordable_;
    if (options_.record_steps && !recordable_) {
      NIBBLE_LOG(kInfo, "steps are not recorded: with this --kernel the host's work is measured");
    }
    const Recording recording = records ? Recording::kDecodeSteps : Recording::kNone;
    // A model that was loaded before goes on with steps that serve both.
    const StepLimits all = steps_ == nullptr ? limits : both(steps_->limits(), limits);
    steps_.reset();
    NIBBLE_ASSIGN_OR_RETURN(steps_,
                            CudaSteps::create(all, recording, {stream_, *branch_, step_rows_}));
    if (vocab_ > 0) {
      NIBBLE_RETURN_IF_ERROR(self_check_->check_sampling(vocab_));
    }
    NIBBLE_LOG(kInfo, "weights: {}", times_.text(uploader_->spent()));
    NIBBLE_LOG(kInfo, "self-test: {} checks in {:.0f} ms", self_check_->checks(),
               self_check_->milliseconds());
    return {};
  }

  void run_step(const StepPlan& plan, const StepLayers& layers) override {
    CHECK(steps_ != nullptr);
    steps_->run(plan, layers);
  }

  [[nodiscard]] bool samples_tokens() const override { return true; }
  [[nodiscard]] bool first_steps_are_slow() const override { return true; }

  void finish_step(std::span<SampledRow> out) override { steps_->finish(out); }

  Result<std::unique_ptr<CalibrationMath>> calibration_math() override {
    return make_cuda_calibration(stream_);
  }

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  void round_bf16(float* x, int64_t count) override {
    must(cuda::round_bf16(x, count, {stream_}), "rounding");
  }

 private:
  [[nodiscard]] Status check_latent_kv(const KvView& shape, int64_t heads) const {
    if (shape.code == KvCode::kF32) {
      return make_error(StatusCode::kUnsupported,
                        "latent attention on the GPU: there are no kernels for a cache in f32, but "
                        "for bf16, fp8, int8 and int4; choose one by --kv-cache-dtype");
    }
    if (shape.head_dim == 576 && shape.latent_rank != 512) {
      return make_error(StatusCode::kUnsupported,
                        "{} takes rows of 576 numbers for a latent of 512, but kv_lora_rank is {}; "
                        "run the model with --device cpu",
                        name(), shape.latent_rank);
    }
    LatentShape latent = latent_shape_of(shape);
    latent.heads = static_cast<int32_t>(heads);
    latent.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
    NIBBLE_RETURN_IF_ERROR(check_latent(latent));
    NIBBLE_RETURN_IF_ERROR(self_check_->check_latent(latent));
    return latent.row_dim == kExpandedRank + kExpandedRope && device_.hopper()
               ? self_check_->check_expanded(latent)
               : Status();
  }

  /// What matrices are packed for: a dense product, or those of the experts of a layer.
  struct PackedFor {
    int64_t max_m = 0;
    int64_t experts = 0;  // 0: a dense product
  };

  [[nodiscard]] GemmContext gemm_context() {
    return {.device = device_,
            .stream = stream_,
            .scratch = scratch_,
            .uploader = *uploader_,
            .branch = branch_.get(),
            .rows = &step_rows_};
  }

  /// The best entry for experts: one that was asked for, if it multiplies them.
  [[nodiscard]] std::optional<size_t> grouped_entry(const GemmProblem& problem) const {
    const auto chosen = choice_->choose(problem);
    if (chosen && entries_[*chosen].grouped) {
      return chosen;
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (entries_[i].grouped && !entries_[i].only_asked && entries_[i].accepts(problem, device_)) {
        return i;
      }
    }
    return std::nullopt;
  }

  [[nodiscard]] Status refuse_experts(const GemmProblem& problem) const {
    constexpr int64_t kUsual = 1024;  // channels that every scheme's groups divide
    std::string names;
    for (const QuantScheme& scheme : all_schemes()) {
      const GemmProblem usual{.weight = device_format(scheme.weight),
                              .act = product_type(scheme.act),
                              .n = kUsual,
                              .k = kUsual,
                              .experts = 1};
      if (grouped_entry(usual)) {
        names += (names.empty() ? "" : ", ") + std::string(scheme.name);
      }
    }
    return make_error(StatusCode::kUnsupported,
                      "no CUDA kernel for experts [{}, {}] in this format with {} activations on "
                      "{}; quantize with --scheme and one of {}, or use --device cpu",
                      problem.n, problem.k, name_of(problem.act), device_.name, names);
  }

  /// Begins to pack: check_packed() waits for the end.
  Result<std::shared_ptr<PackedMatrices>> pack(std::span<const QuantView> parts,
                                               const ActSpec& act,
                                               const PackedFor& use) {
    const QuantView& first = parts.front();
    if (const Status status = check_spec(act); !status.ok()) {
      return status.with_context(first.name);
    }
    const int64_t count = std::max<int64_t>(1, use.experts);
    GemmProblem problem{device_format(first.format), product_type(act.format), 0, first.k};
    const size_t of_each = parts.size() / static_cast<size_t>(count);
    for (const QuantView& part : parts.first(of_each)) {
      problem.n += part.n;
    }
    problem.experts = use.experts;
    problem.blocks = act.blocks;
    if (use.experts > 0 && of_each > 1) {
      problem.rows = WeightRows::kGateUp;
    }
    const auto entry = use.experts > 0 ? grouped_entry(problem) : choice_->choose(problem);
    if (!entry) {
      const Status refused =
          use.experts > 0 ? refuse_experts(problem) : refuse_product(problem, device_);
      return refused.with_context(first.name);
    }
    const bool rounds = problem.weight.code != first.format.code ||
                        problem.weight.scale_dtype != first.format.scale_dtype;
    if (rounds && !rounding_logged_) {
      rounding_logged_ = true;
      NIBBLE_LOG(kWarning, "{} (and maybe others): F16 and F32 are rounded to BF16 on GPUs",
                 first.name);
    }
    for (int64_t i = 0; i < count; ++i) {
      choice_->count(*entry, problem);
    }
    const PackedMatrices::Product product{
        .entry = entries_[*entry], .problem = problem, .max_m = use.max_m, .count = count};
    return times_.prepare(uploader_->spent(),
                          [&] { return PackedMatrices::create(parts, product, gemm_context()); });
  }

  /// One of the products of a layer's experts, which read rows in the form of `acts`: one of all or
  /// one of each.
  Result<CudaExperts::Part> pack_part(std::span<const QuantView> views,
                                      std::span<const ActSpec> acts,
                                      const PackedFor& how) {
    const QuantView& first = views.front();
    auto blocks = DeviceExpertBlocks::create(acts, first.format, first.k);
    if (!blocks.ok()) {
      return blocks.status().with_context(first.name);
    }
    NIBBLE_ASSIGN_OR_RETURN(auto weights, pack(views, acts.front(), how));
    return CudaExperts::Part{std::move(weights), std::move(blocks).value()};
  }

  Status check_first(const CudaExperts::Part& part,
                     std::span<const QuantView> views,
                     const ActSpec& act,
                     int64_t max_m) {
    NIBBLE_ASSIGN_OR_RETURN(auto blocks, blocks_of(views.front(), act));
    CudaGemm first(part.weights, max_m, gemm_context(), std::move(blocks));
    return check_packed(first, views, with_type(act));
  }

  /// Waits until the weights of `gemm` are packed and compares its products with those of `parts`.
  Status check_packed(CudaGemm& gemm, std::span<const QuantView> parts, const ActSpec& act) {
    NIBBLE_RETURN_IF_ERROR(wait_for("packing weights"));
    return self_check_->check_product(gemm, parts, act, kMostCheckedRows);
  }

  /// Waits, while a model is loaded, for what is on its way to the GPU.
  Status wait_for(const char* what) {
    return times_.wait([&] { return check(cudaStreamSynchronize(stream_), what); });
  }

  // What no kernel of this backend does to rows, whatever the product.
  static Status check_spec(const ActSpec& act) {
    const bool columns = act.columns != nullptr && !in_blocks(act.format);
    return !columns && act.static_scale == 0.0F
               ? Status()
               : make_error(StatusCode::kUnsupported,
                            "no CUDA kernel takes {}; quantize the model again with --scheme, or "
                            "use --device cpu",
                            columns ? "activations in the order of their groups (act-order)"
                                    : "activations with a stored scale (static)");
  }

  // Of the forms that rows of experts have, blocks alone may be others for each expert.
  static Status check_rows_of(const ExpertsForm& form) {
    return form.down_acts.empty() || in_blocks(form.down_acts.front().format)
               ? Status()
               : make_error(StatusCode::kUnsupported,
                            "no CUDA kernel rounds {} rows of routed experts otherwise for each "
                            "expert; use --device cpu, or quantize experts in another scheme "
                            "(nibble quantize --rule '*experts*=NAME')",
                            name_of(form.down_acts.front().format));
  }

  Status take_kernels() {
    KernelChoice::Registry registry{.device = name_,
                                    .accepts = [this](size_t entry, const GemmProblem& problem) {
                                      return entries_[entry].accepts(problem, device_);
                                    }};
    for (const GemmEntry& entry : entries_) {
      registry.names.emplace_back(entry.name);
      registry.only_asked += entry.only_asked ? 1 : 0;
    }
    NIBBLE_ASSIGN_OR_RETURN(choice_, KernelChoice::create(std::move(registry), options_.kernels));
    return {};
  }

  // The products take BF16 where the file says nothing of activations.
  static ActFormat product_type(ActFormat act) {
    return act == ActFormat::kFloat ? ActFormat::kBf16 : act;
  }
  static ActSpec with_type(ActSpec act) {
    act.format = product_type(act.format);
    return act;
  }
  static Result<std::shared_ptr<const DeviceBlocks>> blocks_of(const QuantView& first,
                                                               const ActSpec& act) {
    auto blocks = DeviceBlocks::create(act, first.format, first.k);
    return blocks.ok() ? std::move(blocks) : blocks.status().with_context(first.name);
  }

  const DeviceInfo device_;
  const CudaBackendOptions options_;
  const std::span<const GemmEntry> entries_;
  const std::string name_;
  std::optional<KernelChoice> choice_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Uploader> uploader_;
  std::unique_ptr<SelfCheck> self_check_;
  GemmScratch scratch_;
  ExpertScratch experts_;
  std::unique_ptr<StepBranch> branch_;
  StepRows step_rows_;
  std::unique_ptr<CudaSteps> steps_;  // from prepare_steps() on
  // By their places in the file, those on the GPU as they are there, since the last table.
  std::map<const std::byte*, std::weak_ptr<const DeviceBuffer>> matrices_;
  LoadTimes times_;
  int64_t vocab_ = 0;  // rows of the largest table
  bool rounding_logged_ = false;
  bool recordable_ = true;  // all that was prepared is
};

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaBackendOptions& options,
                                                   std::span<const cuda::GemmEntry> entries) {
  NIBBLE_ASSIGN_OR_RETURN(cuda::DeviceInfo device, cuda::query_device(options.device));
  auto backend = std::make_unique<cuda::CudaBackend>(std::move(device), options, entries);
  NIBBLE_RETURN_IF_ERROR(backend->start());
  return std::unique_ptr<Backend>(std::move(backend));
}

cudaStream_t stream_of(const Backend& backend) {
  const auto* of_gpu = dynamic_cast<const cuda::CudaBackend*>(&backend);
  CHECK(of_gpu != nullptr);
  return of_gpu->stream();
}

}  // namespace nibble
