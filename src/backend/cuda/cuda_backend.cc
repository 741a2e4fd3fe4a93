#include "backend/cuda/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "backend/cuda/attention.h"
#include "backend/cuda/bench/gemm_bench.h"
#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/picker.h"
#include "backend/cuda/row_kernels.h"
#include "backend/cuda/scaled_rope.h"
#include "backend/cuda/self_check.h"
#include "backend/cuda/step_buffers.h"
#include "backend/cuda/step_recorder.h"
#include "base/check.h"
#include "base/log.h"

namespace nibble {
namespace cuda {
namespace {

/// Sliding window of the self-test: within its sequence, as a model's own seldom is.
constexpr int32_t kCheckedWindow = 50;
/// Most rows of its products: more of them are more of the same tiles.
constexpr int64_t kMostCheckedRows = 1024;

/// The input of the step that runs, and where it is on the GPU.
struct RunningStep {
  StepBuffers buffers;
  bool decodes = false;   // it has sequences of one row
  bool prefills = false;  // and of several
};

class CudaTable final : public PreparedTable {
 public:
  CudaTable(const QuantView& table,
            std::shared_ptr<const DeviceBuffer> memory,
            DType dtype,
            cudaStream_t stream,
            const std::optional<RunningStep>& step)
      : rows_(table.n),
        width_(table.k),
        memory_(std::move(memory)),
        dtype_(dtype),
        stream_(stream),
        step_(step) {}

  [[nodiscard]] int64_t rows() const override { return rows_; }
  [[nodiscard]] int64_t width() const override { return width_; }
  void gather(const StepInput& input, const StepShape& shape, float* out) const override {
    for (const int32_t token : input.fed ? std::span<const int32_t>() : input.tokens) {
      CHECK_MSG(token >= 0 && token < rows_, "token {} outside 0..{}", token, rows_ - 1);
    }
    must(gather_embeddings(rows_of(step_->buffers.tokens(), shape, out), {stream_}), "embedding");
  }
  void add_positions(const StepInput& /*input*/,
                     const StepShape& shape,
                     int64_t first,
                     float* out) const override {
    EmbeddingArgs args = rows_of(step_->buffers.metadata().row_position, shape, out);
    args.first = first;
    args.result = GatherResult::kAdd;
    must(gather_embeddings(args, {stream_}), "positions");
  }

 private:
  [[nodiscard]] EmbeddingArgs rows_of(const int32_t* rows,
                                      const StepShape& shape,
                                      float* out) const {
    return {.table = memory_->as<void>(),
            .dtype = dtype_,
            .vocab = rows_,
            .tokens = rows,
            .rows = shape.rows,
            .n = width_,
            .out = out};
  }

  int64_t rows_;
  int64_t width_;
  std::shared_ptr<const DeviceBuffer> memory_;
  DType dtype_;
  cudaStream_t stream_;
  const std::optional<RunningStep>& step_;
};

/// How attention is shared out in the step that runs, for one kind of layers.
struct AttentionPlan {
  AttentionShape shape;
  DeviceBuffer plan;
  bool made = false;  // in this step
};

/// rope_append() of a layer, which its attention does as well.
struct PendingAppend {
  RopeAppendLaunch launch;
  LaunchContext context;
};

bool same(const AttentionShape& a, const AttentionShape& b) {
  return a.kv.code == b.kv.code && a.kv.page_size == b.kv.page_size &&
         a.kv.kv_heads == b.kv.kv_heads && a.kv.head_dim == b.kv.head_dim && a.heads == b.heads &&
         a.sliding_window == b.sliding_window && a.scale == b.scale;
}

KvLayout layout_of(const KvView& kv) {
  return {.code = kv.code,
          .page_size = static_cast<int32_t>(kv.page_size),
          .kv_heads = static_cast<int32_t>(kv.kv_heads),
          .head_dim = static_cast<int32_t>(kv.head_dim)};
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
      recorder_.reset();
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
    NIBBLE_RETURN_IF_ERROR(
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"));
    recorder_ = std::make_unique<StepRecorder>(stream_);
    self_check_ = std::make_unique<SelfCheck>(stream_);
    NIBBLE_ASSIGN_OR_RETURN(Uploader uploader, Uploader::create(stream_));
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

  [[nodiscard]] bool picks_tokens() const override { return true; }

  void start_picks(const PickInput& input) override {
    picker_->start(input);
    picking_ = true;
  }

  void pick_tokens(float* logits, int64_t vocab) override {
    must(picker_->pick(logits, vocab, logit_rows_, step_->buffers.next_tokens(), stream_));
  }

  void finish_picks(std::span<PickedRow> out) override { must(picker_->finish(out)); }

  void read(const float* from, std::span<float> to) override {
    must(cudaMemcpyAsync(to.data(), from, to.size_bytes(), cudaMemcpyDeviceToHost, stream_),
         "copying logits");
    must(cudaStreamSynchronize(stream_), "a step");
  }

  [[nodiscard]] int64_t kv_page_bytes(const KvView& shape) const override {
    return page_bytes(layout_of(shape));
  }

  [[nodiscard]] int64_t preferred_page_size(KvCode code) const override {
    return cuda::preferred_page_size(code);
  }

  [[nodiscard]] Status check_kv(const KvView& shape, int64_t heads) const override {
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

  Result<double> measure_read_gbps() override {
    NIBBLE_ASSIGN_OR_RETURN(const double tbps, measure_read_tbps(device_));
    return tbps * 1e3;
  }

  Result<Json> bench_kernels(const KernelBenchOptions& options) override {
    GemmBenchOptions chosen{.schemes = options.schemes,
                            .shapes = standard_gemm_shapes(),
                            .row_counts = options.row_counts,
                            .rest = options.rest};
    if (!options.shapes.empty()) {
      chosen.shapes.clear();
      for (const auto& [n, k] : options.shapes) {
        chosen.shapes.push_back({n, k});
      }
    }
    if (device_.hopper()) {  // the families of older GPUs are not what would run
      for (const GemmEntry& entry : gemm_entries()) {
        if (!entry.name.ends_with("_sm80")) {
          chosen.kernels.emplace_back(entry.name);
        }
      }
    }
    if (chosen.row_counts.empty()) {
      chosen.row_counts = standard_gemm_rows();
    }
    if (options.progress) {
      chosen.progress = [&options](const GemmTiming& timing) {
        options.progress(gemm_timing_line(timing));
      };
    }
    NIBBLE_ASSIGN_OR_RETURN(const GemmBenchReport report, bench_gemms(device_, chosen));
    return gemm_bench_json(device_, report);
  }

  Result<std::unique_ptr<PreparedTable>> prepare_table(
      const QuantView& table, std::shared_ptr<const void> /*owner*/) override {
    const WeightCode code = table.format.code;
    const DType dtype = code == WeightCode::kBf16  ? DType::kBF16
                        : code == WeightCode::kF16 ? DType::kF16
                                                   : DType::kF32;
    vocab_ = std::max(vocab_, table.n);
    const auto bytes = static_cast<size_t>(table.n * table.row_bytes());
    std::shared_ptr<const DeviceBuffer> memory = matrices_[table.codes].lock();
    matrices_.clear();  // other files may come to the same place
    if (memory == nullptr || memory->size() != bytes) {
      NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer copy, allocate_device(bytes, "the embedding"));
      NIBBLE_RETURN_IF_ERROR(uploader_->upload(table.codes, bytes, copy.as<void>()));
      NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream_), "copying the embedding"));
      memory = std::make_shared<const DeviceBuffer>(std::move(copy));
    }
    return std::unique_ptr<PreparedTable>(
        std::make_unique<CudaTable>(table, std::move(memory), dtype, stream_, step_));
  }

  [[nodiscard]] Status check_gemm(const WeightFormat& format,
                                  ActFormat act,
                                  int64_t k) const override {
    return CudaGemm::choose(entries_, {CudaGemm::device_format(format), product_type(act), 128, k},
                            device_)
        .status();
  }

  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView> parts,
                                                     ActFormat act,
                                                     int64_t max_m) override {
    const WeightFormat& format = parts.front().format;
    GemmProblem problem{CudaGemm::device_format(format), product_type(act), 0, parts.front().k};
    for (const QuantView& part : parts) {
      problem.n += part.n;
    }
    const auto entry = CudaGemm::choose(entries_, problem, device_);
    if (!entry.ok()) {
      return entry.status().with_context(parts.front().name);
    }
    const bool rounds =
        problem.weight.code != format.code || problem.weight.scale_dtype != format.scale_dtype;
    if (rounds && !rounding_logged_) {
      rounding_logged_ = true;
      NIBBLE_LOG(kWarning, "{} (and maybe others): F16 and F32 are rounded to BF16 on GPUs",
                 parts.front().name);
    }
    if (logged_.emplace(problem.n, problem.k, (*entry)->name).second) {
      NIBBLE_LOG(kInfo, "[{}, {}]: {}", problem.n, problem.k, (*entry)->name);
    }
    NIBBLE_ASSIGN_OR_RETURN(
        auto gemm,
        CudaGemm::create(
            parts, **entry, problem, max_m,
            {.device = device_, .stream = stream_, .scratch = scratch_, .uploader = *uploader_}));
    NIBBLE_RETURN_IF_ERROR(self_check_->check_product(*gemm, parts, problem.act, kMostCheckedRows));
    if (parts.size() == 1 && format.code == problem.weight.code) {
      matrices_[parts.front().codes] = gemm->codes();
    }
    return std::unique_ptr<PreparedGemm>(std::move(gemm));
  }

  Status prepare_steps(const StepLimits& limits) override {
    limits_ = limits;
    NIBBLE_ASSIGN_OR_RETURN(StepBuffers buffers, StepBuffers::create(limits));
    step_.emplace(RunningStep{std::move(buffers)});
    NIBBLE_ASSIGN_OR_RETURN(picker_, Picker::create(limits.sequences));
    if (vocab_ > 0) {
      NIBBLE_RETURN_IF_ERROR(self_check_->check_sampling(vocab_));
    }
    NIBBLE_LOG(kInfo, "self-test: {} checks in {:.0f} ms", self_check_->checks(),
               self_check_->milliseconds());
    return {};
  }

  void run_step(const StepInput& input,
                int64_t program,
                const std::function<void(const StepShape&)>& layers) override {
    StepShape shape{std::ssize(input.tokens), std::ssize(input.logit_rows)};
    const auto one = [](const SequenceSpan& s) { return s.q_len == 1; };
    step_->decodes = std::ranges::any_of(input.sequences, one);
    step_->prefills = !std::ranges::all_of(input.sequences, one);
    const bool record = options_.record_steps && !step_->prefills &&
                        shape.rows == shape.logit_rows && std::ranges::is_sorted(input.logit_rows);
    if (record) {
      shape.rows = StepRecorder::bucket(shape.rows, std::min(limits_.rows, limits_.sequences));
      shape.logit_rows = shape.rows;
    }
    must(step_->buffers.write(input, shape, stream_));
    const bool picks = std::exchange(picking_, false);
    logit_rows_ = shape.logit_rows;
    if (picks) {
      must(picker_->upload(shape.logit_rows, stream_));
    }
    const auto issue = [&] {
      for (AttentionPlan& plan : plans_) {
        plan.made = false;
      }
      scaled_rope_.begin_step();
      layers(shape);
    };
    if (record) {
      // What is recorded depends on these, too.
      const bool is_short = step_->buffers.metadata().longest <= kShortAttention;
      const int64_t kind = (picks ? 2 + 2 * picker_->kind() : 0) + (is_short ? 1 : 0);
      must(recorder_->run(program * (2 * Picker::kKinds + 2) + kind, shape.rows, issue));
    } else {
      issue();
    }
    if (picks) {
      must(picker_->download(stream_));
    }
  }

  void pick_rows(const StepInput& /*input*/,
                 const StepShape& shape,
                 const float* from,
                 int64_t width,
                 float* to) override {
    // The rows of a table in F32 whose tokens are the wanted rows.
    must(gather_embeddings({.table = from,
                            .dtype = DType::kF32,
                            .vocab = shape.rows,
                            .tokens = step_->buffers.logit_rows(),
                            .rows = shape.logit_rows,
                            .n = width,
                            .out = to},
                           {stream_}),
         "picking rows");
  }

  void round_bf16(float* x, int64_t count) override {
    must(cuda::round_bf16(x, count, {stream_}), "rounding");
  }

  void rope_append_kv(const RopeAppendArgs& args) override {
    CHECK(!append_.has_value());
    RopeAppendLaunch launch{.shape = {.kv = layout_of(args.kv),
                                      .heads = static_cast<int32_t>(args.heads),
                                      .form = args.form},
                            .step = step_->buffers.metadata(),
                            .pages = args.kv.pages,
                            .qkv = args.qkv.data,
                            .qkv_stride = args.stride,
                            .inv_freq = args.inv_freq,
                            .attention_factor = args.attention_factor,
                            .q_norm = args.q_norm,
                            .k_norm = args.k_norm,
                            .norm_eps = args.norm_eps};
    const auto context = scaled_rope_.prepare(args, limits_.rows, stream_, launch);
    must(context.status());
    if (!step_->prefills && !decode_reads_plan(launch.shape, launch.step)) {
      append_ = {launch, *context};  // the attention that follows does it
    } else {
      must(rope_append(launch, *context), "rope");
    }
  }

  void attention(const AttentionArgs& args) override {
    CHECK(args.q.type == DType::kBF16 && args.out.type == DType::kBF16);
    const AttentionShape shape{.kv = layout_of(args.kv),
                               .heads = static_cast<int32_t>(args.heads),
                               .sliding_window = static_cast<int32_t>(args.sliding_window),
                               .scale = args.scale,
                               .form = args.form};
    AttentionPlan& plan = plan_of(shape);
    const AttentionLaunch launch{.shape = shape,
                                 .step = step_->buffers.metadata(),
                                 .plan = plan.plan.as<void>(),
                                 .pages = args.kv.pages,
                                 .q = args.q.data,
                                 .q_stride = args.q_stride,
                                 .out = args.out.data,
                                 .out_stride = args.out_stride,
                                 .workspace = attention_workspace_.as<void>()};
    if (const auto append = std::exchange(append_, std::nullopt)) {
      CHECK(append->launch.pages == args.kv.pages && append->launch.qkv == args.q.data);
      must(append_decode_attention(append->launch, launch, append->context), "attention");
      return;
    }
    const bool planned = step_->prefills || decode_reads_plan(shape, launch.step);
    // The plan is read early: what comes right behind it must not overlap it.
    const LaunchContext context{.stream = stream_, .overlap = plan.made || !planned};
    if (planned && !plan.made) {
      must(plan_attention(shape, launch.step, plan.plan.as<void>(), {stream_}), "attention plan");
      plan.made = true;
    }
    if (step_->decodes) {
      must(decode_attention(launch, context), "attention");
    }
    if (step_->prefills) {
      must(prefill_attention(launch, context), "attention");
    }
  }

 private:
  // The products take BF16 where the file says nothing of activations.
  static ActFormat product_type(ActFormat act) {
    return act == ActFormat::kFloat ? ActFormat::kBf16 : act;
  }

  AttentionPlan& plan_of(const AttentionShape& shape) {
    const auto found =
        std::ranges::find_if(plans_, [&](const AttentionPlan& p) { return same(p.shape, shape); });
    if (found != plans_.end()) {
      return *found;
    }
    const size_t bytes = attention_plan_bytes(shape, static_cast<int32_t>(limits_.sequences),
                                              static_cast<int32_t>(limits_.rows));
    auto plan = allocate_device(bytes, "the plan of attention");
    must(plan.status());
    const size_t workspace = attention_workspace_bytes(shape);
    if (workspace > attention_workspace_.size()) {
      auto memory = allocate_zeroed(workspace, "attention");
      must(memory.status());
      retired_.push_back(std::move(attention_workspace_));  // recorded steps may use it
      attention_workspace_ = std::move(memory).value();
    }
    plans_.push_back({.shape = shape, .plan = std::move(plan).value()});
    return plans_.back();
  }

  const DeviceInfo device_;
  const CudaBackendOptions options_;
  const std::span<const GemmEntry> entries_;
  const std::string name_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<StepRecorder> recorder_;
  std::unique_ptr<Uploader> uploader_;
  std::unique_ptr<SelfCheck> self_check_;
  GemmScratch scratch_;
  StepLimits limits_;
  std::optional<RunningStep> step_;
  std::optional<Picker> picker_;
  // By their places in the file, those on the GPU as they are there, since the last table.
  std::map<const std::byte*, std::weak_ptr<const DeviceBuffer>> matrices_;
  int64_t vocab_ = 0;                    // rows of the largest table
  bool picking_ = false;                 // by the next step
  int64_t logit_rows_ = 0;               // of the step that runs
  std::optional<PendingAppend> append_;  // of the layer's attention, which is to come
  ScaledRope scaled_rope_;
  std::vector<AttentionPlan> plans_;
  DeviceBuffer attention_workspace_;
  std::vector<DeviceBuffer> retired_;
  bool rounding_logged_ = false;
  std::set<std::tuple<int64_t, int64_t, std::string_view>> logged_;
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

}  // namespace nibble
