#include <algorithm>
#include <cmath>

#include "backend/backend.h"
#include "backend/cpu/cpu_gemm.h"
#include "backend/cpu/isa.h"
#include "base/check.h"
#include "base/log.h"

namespace nibble {
namespace cpu {
namespace {

constexpr int64_t kSerialElements = 4096;  // below, one thread does the rows of an elementwise loop

KvLayout layout_of(const KvView& kv) {
  static_assert(static_cast<int>(KvCode::kF32) == 0 && static_cast<int>(KvCode::kBf16) == 1 &&
                static_cast<int>(KvCode::kInt8) == 2 && static_cast<int>(KvCode::kInt4) == 3);
  CHECK_EQ(kv.head_dim % 8, 0);
  CHECK_LE(kv.head_dim, kMaxHeadDim);
  KvLayout layout;
  layout.pages = reinterpret_cast<uint8_t*>(kv.pages);
  layout.code = static_cast<int64_t>(kv.code);
  layout.page_size = kv.page_size;
  layout.page_bytes = kv.page_bytes();
  layout.half_bytes = kv.half_bytes();
  layout.params_offset = kv.params_offset();
  layout.row_bytes = kv_row_bytes(kv.code, kv.head_dim);
  layout.row_params = kv_row_params(kv.code);
  layout.head_dim = kv.head_dim;
  return layout;
}

/// Pieces of `unit` new tokens that a step's sequences fall into.
int64_t count_pieces(std::span<const SequenceSpan> sequences, int64_t unit) {
  int64_t pieces = 0;
  for (const SequenceSpan& sequence : sequences) {
    pieces += (sequence.q_len + unit - 1) / unit;
  }
  return pieces;
}

struct Piece {
  const SequenceSpan* sequence;
  int64_t first_token;  // within the sequence's new tokens
};

Piece find_piece(std::span<const SequenceSpan> sequences, int64_t unit, int64_t index) {
  for (const SequenceSpan& sequence : sequences) {
    const int64_t pieces = (sequence.q_len + unit - 1) / unit;
    if (index < pieces) {
      return {&sequence, index * unit};
    }
    index -= pieces;
  }
  CHECK_MSG(false, "piece {} is past the last sequence", index);
  return {};
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& kernels, const ThreadPlan& plan)
      : kernels_(kernels), name_(fmt::format("cpu/{}", kernels.name)), pool_(plan) {}

  Status allocate_scratch() {
    const int64_t bytes = pool_.threads() * kAttentionScratch * 4;
    NIBBLE_ASSIGN_OR_RETURN(scratch_, Buffer::allocate(static_cast<size_t>(bytes)));
    return {};
  }

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] int threads() const override { return pool_.threads(); }

  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView> parts,
                                                     ActFormat act,
                                                     int64_t max_m) override {
    return CpuGemm::create(parts, act, max_m, kernels_, weights_, pool_);
  }

  void rms_norm(
      const float* x, int64_t rows, int64_t n, const float* weight, float eps, float* y) override {
    for_rows(rows, n, [&](int64_t r) { kernels_.rms_norm(x + r * n, n, weight, eps, y + r * n); });
  }

  void silu_mul(const float* gate_up, int64_t rows, int64_t n, float* y) override {
    for_rows(rows, n, [&](int64_t r) {
      kernels_.silu_mul(gate_up + 2 * r * n, gate_up + (2 * r + 1) * n, n, y + r * n);
    });
  }

  void add_bias(float* y, int64_t rows, int64_t n, const float* bias) override {
    for_rows(rows, n, [&](int64_t r) { kernels_.add(y + r * n, bias, n); });
  }

  void round_bf16(float* x, int64_t count) override {
    const int64_t pieces = (count + kSerialElements - 1) / kSerialElements;
    for_rows(pieces, kSerialElements, [&](int64_t piece) {
      const int64_t begin = piece * kSerialElements;
      const QuantizeTask task{
          .x = x + begin, .k = std::min(kSerialElements, count - begin), .out = x + begin};
      kernels_.round_bf16(task, 0);
    });
  }

  void rope_append_kv(const RopeAppendArgs& args) override;
  void attention(const AttentionArgs& args) override;

 private:
  template <typename Fn>
  void for_rows(int64_t rows, int64_t n, const Fn& fn) {
    if (rows * n <= kSerialElements) {
      for (int64_t r = 0; r < rows; ++r) {
        fn(r);
      }
      return;
    }
    pool_.parallel_for(rows, [&](int64_t r, int) { fn(r); });
  }

  void rope_append_token(const RopeAppendArgs& args, const KvLayout& layout, const Piece& piece);

  const KernelTable& kernels_;
  std::string name_;
  ThreadPool pool_;
  BufferArena weights_;
  Buffer scratch_;
};

void CpuBackend::rope_append_kv(const RopeAppendArgs& args) {
  const KvLayout layout = layout_of(args.kv);
  pool_.parallel_for(count_pieces(args.sequences, 1), [&](int64_t index, int) {
    rope_append_token(args, layout, find_piece(args.sequences, 1, index));
  });
}

void CpuBackend::rope_append_token(const RopeAppendArgs& args,
                                   const KvLayout& layout,
                                   const Piece& piece) {
  const SequenceSpan& sequence = *piece.sequence;
  const int64_t dim = layout.head_dim;
  const int64_t position = sequence.kv_len - sequence.q_len + piece.first_token;
  float cosine[kMaxHeadDim / 2];
  float sine[kMaxHeadDim / 2];
  for (int64_t i = 0; i < dim / 2; ++i) {
    const double angle = static_cast<double>(position) * args.inv_freq[i];
    cosine[i] = static_cast<float>(std::cos(angle) * args.attention_factor);
    sine[i] = static_cast<float>(std::sin(angle) * args.attention_factor);
  }
  float* q = args.qkv + (sequence.q_begin + piece.first_token) * args.stride;
  float* k = q + args.heads * dim;
  float* v = k + args.kv.kv_heads * dim;
  for (int64_t head = 0; head < args.heads + args.kv.kv_heads; ++head) {
    kernels_.rotate(q + head * dim, dim, cosine, sine);
  }
  const int64_t page = sequence.pages[position / layout.page_size];
  const int64_t slot = position % layout.page_size;
  for (int64_t head = 0; head < args.kv.kv_heads; ++head) {
    uint8_t* half = layout.pages + page * layout.page_bytes + head * 2 * layout.half_bytes;
    for (float* row : {k + head * dim, v + head * dim}) {
      auto* params =
          reinterpret_cast<float*>(half + layout.params_offset) + slot * layout.row_params;
      kernels_.write_kv(layout, row, half + slot * layout.row_bytes, params);
      half += layout.half_bytes;
    }
  }
}

void CpuBackend::attention(const AttentionArgs& args) {
  CHECK_EQ(args.heads % args.kv.kv_heads, 0);
  const KvLayout layout = layout_of(args.kv);
  const int64_t group = args.heads / args.kv.kv_heads;
  CHECK_LE(group, kQueryRows);
  const int64_t unit = std::max<int64_t>(1, kQueryRows / group);
  const int64_t pieces = count_pieces(args.sequences, unit);
  pool_.parallel_for(pieces * args.kv.kv_heads, [&](int64_t index, int thread) {
    const int64_t kv_head = index % args.kv.kv_heads;
    const Piece piece = find_piece(args.sequences, unit, index / args.kv.kv_heads);
    const SequenceSpan& sequence = *piece.sequence;
    const int64_t row = sequence.q_begin + piece.first_token;
    const int64_t offset = kv_head * group * layout.head_dim;
    AttentionTask task;
    task.q = args.q + row * args.q_stride + offset;
    task.q_stride = args.q_stride;
    task.out = args.out + row * args.out_stride + offset;
    task.out_stride = args.out_stride;
    task.tokens = std::min<int64_t>(unit, sequence.q_len - piece.first_token);
    task.group = group;
    task.scale = args.scale;
    task.window = args.sliding_window;
    task.first_position = sequence.kv_len - sequence.q_len + piece.first_token;
    task.kv = layout;
    task.kv_head = kv_head;
    task.page_list = sequence.pages;
    task.scratch = scratch_.as<float>().data() + thread * kAttentionScratch;
    kernels_.attention(task);
  });
}

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
  auto backend = std::make_unique<cpu::CpuBackend>(*kernels, plan_of(options));
  NIBBLE_RETURN_IF_ERROR(backend->allocate_scratch());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace nibble
