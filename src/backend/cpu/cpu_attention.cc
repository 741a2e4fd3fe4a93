#include "backend/cpu/cpu_attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "backend/cpu/kv_rows.h"
#include "backend/cpu/numbers.h"
#include "base/check.h"
#include "quant/hadamard.h"

namespace nibble::cpu {

namespace {

constexpr int64_t kRotationRows = 4096;  // rows of a batch whose rotations are kept
constexpr int64_t kPartialFloats = int64_t{16} << 20;
constexpr int64_t kTasksPerThread = 4;  // so many let threads end at about the same time
constexpr int64_t kFewestRows = 16;     // rows of a task when there are not enough tasks

/// How the new tokens of sequences are cut: into `unit` at a time, from the first new one on or
/// from multiples of `unit` in their sequence.
struct Cut {
  int64_t unit = 1;
  bool at_multiples = false;

  /// Of a sequence's new tokens, how many lie in front of the first one's block.
  [[nodiscard]] int64_t lead(const SequenceSpan& sequence) const {
    return at_multiples ? (sequence.kv_len - sequence.q_len) % unit : 0;
  }
  [[nodiscard]] int64_t blocks(const SequenceSpan& sequence) const {
    return (lead(sequence) + sequence.q_len + unit - 1) / unit;
  }
};

/// Blocks that a step's sequences fall into.
int64_t count_blocks(std::span<const SequenceSpan> sequences, const Cut& cut) {
  int64_t blocks = 0;
  for (const SequenceSpan& sequence : sequences) {
    blocks += cut.blocks(sequence);
  }
  return blocks;
}

struct TokenBlock {
  int64_t sequence;     // its index
  int64_t first_token;  // within the sequence's new tokens
  int64_t tokens;
};

TokenBlock find_block(std::span<const SequenceSpan> sequences, const Cut& cut, int64_t index) {
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int64_t blocks = cut.blocks(sequences[s]);
    if (index < blocks) {
      const int64_t begin = index * cut.unit - cut.lead(sequences[s]);
      const int64_t end = std::min<int64_t>(begin + cut.unit, sequences[s].q_len);
      const int64_t first = std::max<int64_t>(begin, 0);
      return {static_cast<int64_t>(s), first, end - first};
    }
    index -= blocks;
  }
  CHECK_MSG(false, "block {} is past the last sequence", index);
  return {};
}

/// Pieces of the keys that a sequence's new tokens see.
struct PieceRange {
  int64_t first;
  int64_t count;
};

PieceRange pieces_of(const SequenceSpan& sequence, int64_t window, int64_t piece_keys) {
  const int64_t oldest = sequence.kv_len - sequence.q_len;
  const int64_t key = window > 0 ? std::max<int64_t>(0, oldest - window + 1) : 0;
  const int64_t first = key / piece_keys;
  return {first, (sequence.kv_len + piece_keys - 1) / piece_keys - first};
}

}  // namespace

Status CpuAttention::allocate_scratch() {
  const auto allocate = [](Buffer& buffer, int64_t bytes) -> Status {
    NIBBLE_ASSIGN_OR_RETURN(buffer, Buffer::allocate(static_cast<size_t>(bytes)));
    return {};
  };
  NIBBLE_RETURN_IF_ERROR(allocate(scratch_, pool_.threads() * kAttentionScratch * 4));
  NIBBLE_RETURN_IF_ERROR(allocate(partials_, kPartialFloats * 4));
  NIBBLE_RETURN_IF_ERROR(allocate(rotations_, kRotationRows * kMaxHeadDim * 4));
  return allocate(rotated_places_, kRotationRows * static_cast<int64_t>(sizeof(RotatedPlace)));
}

int64_t CpuAttention::latent_bytes(const StepLimits& limits, int64_t threads) {
  if (limits.latent_heads == 0) {
    return 0;
  }
  // Of each thread a block of keys and its rows' queries, sums and those of earlier pieces.
  const int64_t rows = std::min(kQueryRows, limits.rows * limits.latent_heads);
  const int64_t floats = (2 * kKeyChunk + 4 * rows) * limits.latent_row;
  return 4 * (threads * std::min(floats, kAttentionScratch) + kPartialFloats);
}

void CpuAttention::rope_append_kv(const RopeAppendArgs& args) {
  CHECK_MSG(!args.kv.latent(), "rows of latent attention are appended by append_latent()");
  const KvWriter writer(kernels_, args.kv, layout_of(args.kv));
  select_rotation(args);
  pool_.parallel_for(count_blocks(args.sequences, {}), [&](int64_t index, int) {
    const TokenBlock block = find_block(args.sequences, {}, index);
    rope_append_token(args, writer, block.sequence, block.first_token);
  });
  if (kv_has_residual(args.kv.code)) {
    code_full_groups(args, writer);
  }
  report_.add(writer.far_outside());
}

/// Codes the keys of groups whose last token was among the step's.
void CpuAttention::code_full_groups(const RopeAppendArgs& args, const KvWriter& writer) {
  struct Group {
    int64_t sequence;
    int64_t first_token;  // in its sequence
  };
  std::vector<Group> groups;
  for (size_t s = 0; s < args.sequences.size(); ++s) {
    const SequenceSpan& sequence = args.sequences[s];
    const int64_t first = (sequence.kv_len - sequence.q_len) / kChannelTokens;
    for (int64_t group = first; group < sequence.kv_len / kChannelTokens; ++group) {
      groups.push_back({static_cast<int64_t>(s), group * kChannelTokens});
    }
  }
  const int64_t kv_heads = args.kv.kv_heads;
  pool_.parallel_for(std::ssize(groups) * kv_heads, [&](int64_t index, int thread) {
    const auto& [sequence, token] = groups[static_cast<size_t>(index / kv_heads)];
    const auto s = static_cast<size_t>(sequence);
    const int64_t page = token / args.kv.page_size;
    writer.code_keys({.page = args.sequences[s].pages[page],
                      .residual_page = args.residuals[s].pages[page],
                      .kv_head = index % kv_heads,
                      .slot = token % args.kv.page_size},
                     scratch_.as<float>().data() + thread * kAttentionScratch);
  });
}

/// Forgets the kept rotations when they are of another kind.
void CpuAttention::select_rotation(const RopeAppendArgs& args) {
  const int64_t dim = args.kv.head_dim;
  const auto bytes = static_cast<size_t>(dim / 2) * sizeof(float);
  if (rotation_dim_ == dim && attention_factor_ == args.attention_factor &&
      std::memcmp(inv_freq_, args.inv_freq, bytes) == 0) {
    return;
  }
  rotation_dim_ = dim;
  attention_factor_ = args.attention_factor;
  std::memcpy(inv_freq_, args.inv_freq, bytes);
  std::ranges::fill(rotated_places_.as<RotatedPlace>(), RotatedPlace{});
}

/// Cosines and sines [dim/2] each; written to `spare` for rows past those that are kept.
const float* CpuAttention::rotation_of(const RopeAppendArgs& args,
                                       const SequenceSpan& sequence,
                                       int64_t token,
                                       float* spare) {
  const int64_t dim = args.kv.head_dim;
  const int64_t row = sequence.q_begin + token;
  const int64_t position = sequence.kv_len - sequence.q_len + token;
  const double growth = base_growth(args.dynamic, rotated_length(sequence.prompt_len, position));
  float* cosine = spare;
  if (row < kRotationRows) {
    cosine = rotations_.as<float>().data() + row * dim;
    RotatedPlace& kept = rotated_places_.as<RotatedPlace>()[static_cast<size_t>(row)];
    if (kept.position == position && kept.growth == growth) {
      return cosine;
    }
    kept = {position, growth};
  }
  float* sine = cosine + dim / 2;
  for (int64_t i = 0; i < dim / 2; ++i) {
    const float frequency =
        growth == 1.0 ? args.inv_freq[i] : grown_frequency(args.inv_freq[i], growth, i, dim);
    const double angle = static_cast<double>(position) * frequency;
    cosine[i] = static_cast<float>(std::cos(angle) * args.attention_factor);
    sine[i] = static_cast<float>(std::sin(angle) * args.attention_factor);
  }
  return cosine;
}

void CpuAttention::rope_append_token(const RopeAppendArgs& args,
                                     const KvWriter& writer,
                                     int64_t index,
                                     int64_t token) {
  const int64_t dim = args.kv.head_dim;
  const SequenceSpan& sequence = args.sequences[static_cast<size_t>(index)];
  const int64_t row = sequence.q_begin + token;
  const int64_t position = sequence.kv_len - sequence.q_len + token;
  float spare[kMaxHeadDim];
  const float* cosine = rotation_of(args, sequence, token, spare);
  const int64_t page = position / args.kv.page_size;
  KvSlot slot{.page = sequence.pages[page], .slot = position % args.kv.page_size};
  if (kv_has_residual(args.kv.code)) {
    slot.residual_page = args.residuals[static_cast<size_t>(index)].pages[page];
  }
  const int64_t kv_heads = args.kv.kv_heads;
  for (int64_t head = 0; head < args.heads + 2 * kv_heads; ++head) {
    const Numbers numbers = numbers_of(args.qkv.at(row * args.stride + head * dim));
    const int64_t kv_head = head - args.heads;  // negative: a query; then keys, then values
    float values[kMaxHeadDim];
    kernels_.load({numbers.data, numbers.type}, dim, values);
    if (kv_head < kv_heads) {
      const float* norm = kv_head < 0 ? args.q_norm : args.k_norm;
      if (norm != nullptr) {
        kernels_.rms_norm(values, dim, norm, args.norm_eps, values);
      }
      kernels_.rotate(values, dim, cosine, cosine + dim / 2);
      if (args.form == AttentionForm::kShared) {
        kernels_.round_row(values, dim, kv_head < 0 ? kQueryPlaces : kKeyPlaces);
      }
    }
    const KvBasis& basis = args.kv.basis;
    const bool is_value = kv_head >= kv_heads;
    if (const float* mean = is_value ? basis.value_mean : basis.key_mean;
        mean != nullptr && kv_head >= 0) {
      mean += kv_head % kv_heads * dim;
      std::transform(values, values + dim, mean, values, std::minus<>());
    }
    if (is_value ? basis.turns_values : basis.turns_keys) {
      hadamard(values, dim);
    }
    if (kv_head < 0) {
      if (basis.key_step != nullptr) {
        const float* step = basis.key_step + head / (args.heads / kv_heads) * dim;
        std::transform(values, values + dim, step, values, std::multiplies<>());
      }
      kernels_.store(values, dim, numbers);
      continue;
    }
    slot.kv_head = kv_head % kv_heads;
    is_value ? writer.write_value(slot, values) : writer.write_key(slot, values);
  }
}

/// How a step's attention falls into tasks. The results do not depend on it.
struct CpuAttention::Plan {
  KvLayout layout;
  int64_t heads = 0;  // shares of the query heads: those of one KV head, or a part of them
  int64_t group = 0;  // query heads of a share
  Cut cut;            // of tokens into tasks
  int64_t piece_keys = kKeyPiece;
  int64_t pieces = 0;  // tasks per block of tokens and share, in each its own piece; 0: one task
  int64_t blocks = 0;  // of tokens

  [[nodiscard]] int64_t tasks() const { return blocks * heads; }
  [[nodiscard]] int64_t state_floats() const {
    return attention_states_floats(cut.unit * group, layout.head_dim);
  }
  /// All keys of a block of tokens and one share; `index` < tasks().
  [[nodiscard]] AttentionTask task(const AttentionArgs& args, int64_t index, float* scratch) const;
};

AttentionTask CpuAttention::Plan::task(const AttentionArgs& args,
                                       int64_t index,
                                       float* scratch) const {
  const int64_t share = index % heads;
  const int64_t kv_head = share / (heads / args.kv.kv_heads);
  const TokenBlock block = find_block(args.sequences, cut, index / heads);
  const auto s = static_cast<size_t>(block.sequence);
  const SequenceSpan& sequence = args.sequences[s];
  const int64_t row = sequence.q_begin + block.first_token;
  const int64_t offset = share * group * layout.head_dim;
  AttentionTask task;
  task.q = numbers_of(args.q.at(row * args.q_stride + offset));
  task.q_stride = args.q_stride;
  task.out = numbers_of(args.out.at(row * args.out_stride + offset));
  task.out_stride = args.out_stride;
  task.tokens = block.tokens;
  task.group = group;
  task.scale = args.scale * args.kv.scales.k;
  task.value_scale = args.kv.scales.v;
  task.sinks = args.sinks == nullptr ? nullptr : args.sinks + share * group;
  task.window = args.sliding_window;
  task.turn_back = args.kv.basis.turns_values ? inverse_hadamard : nullptr;
  const float* mean = args.kv.basis.value_mean;
  task.value_mean = mean == nullptr ? nullptr : mean + kv_head * layout.head_dim;
  const float* step = args.kv.basis.value_step;
  task.value_step = step == nullptr ? nullptr : step + kv_head * layout.head_dim;
  task.whole_tops = args.form == AttentionForm::kShared && args.kv.code == KvCode::kBf16;
  task.first_position = sequence.kv_len - sequence.q_len + block.first_token;
  task.kv = layout;
  task.kv_head = kv_head;
  task.page_list = sequence.pages;
  if (kv_has_residual(args.kv.code)) {
    task.residual_list = args.residuals[s].pages;
    task.residual_from = task.first_position / kChannelTokens * kChannelTokens;
  }
  task.scratch = scratch;
  task.piece_keys = piece_keys;
  return task;
}

CpuAttention::Plan CpuAttention::plan_of(const AttentionArgs& args) const {
  CHECK_EQ(args.heads % args.kv.kv_heads, 0);
  CHECK(args.sinks == nullptr ||
        (args.kv.basis.key_mean == nullptr && args.kv.basis.value_mean == nullptr));
  Plan plan;
  plan.layout = layout_of(args.kv);
  plan.heads = args.kv.kv_heads;
  plan.group = args.heads / args.kv.kv_heads;
  plan.piece_keys = args.kv.latent() ? kLatentPiece : kKeyPiece;
  CHECK_LE(plan.group, kQueryRows);
  const int64_t wanted = kTasksPerThread * pool_.threads();
  for (int64_t rows = kernels_.attention_rows;; rows /= 2) {
    plan.cut.unit = std::max<int64_t>(1, rows / plan.group);
    if (kv_has_residual(args.kv.code)) {  // tokens of a task read the same keys as they are
      const auto unit = static_cast<uint64_t>(std::min(plan.cut.unit, kChannelTokens));
      plan.cut = {.unit = static_cast<int64_t>(std::bit_floor(unit)), .at_multiples = true};
    }
    plan.blocks = count_blocks(args.sequences, plan.cut);
    if (rows <= kFewestRows || plan.tasks() >= wanted) {
      break;
    }
  }
  if (args.kv.code != KvCode::kF32 && pool_.threads() > 1 && plan.tasks() < wanted) {
    cut_keys(args, plan);
  }
  return plan;
}

/// Makes pieces of the keys tasks of their own, and of a latent, whose rows all heads share, parts
/// of the heads where these are still too few.
void CpuAttention::cut_keys(const AttentionArgs& args, Plan& plan) const {
  int64_t pieces = 0;
  for (const SequenceSpan& sequence : args.sequences) {
    pieces = std::max(pieces, pieces_of(sequence, args.sliding_window, plan.piece_keys).count);
  }
  if (pieces > 1 && plan.tasks() * pieces * plan.state_floats() <= kPartialFloats) {
    plan.pieces = pieces;
  }
  while (args.kv.latent() && plan.tasks() * pieces < pool_.threads() && plan.group % 2 == 0 &&
         plan.cut.unit * plan.group >= 2 * kFewestRows) {
    plan.heads *= 2;
    plan.group /= 2;
  }
}

void CpuAttention::attention(const AttentionArgs& args) {
  const Plan plan = plan_of(args);
  if (plan.pieces > 0) {
    run_pieces(args, plan);
    return;
  }
  const int64_t tasks = plan.tasks();
  pool_.parallel_for(tasks, [&](int64_t index, int thread) {
    // The last tokens of a sequence see most keys: they begin.
    float* scratch = scratch_.as<float>().data() + thread * kAttentionScratch;
    kernels_.attention(plan.task(args, tasks - 1 - index, scratch));
  });
}

/// Each piece of the keys as a task of its own; then their sums are merged in order.
void CpuAttention::run_pieces(const AttentionArgs& args, const Plan& plan) {
  const int64_t tasks = plan.tasks();
  const int64_t floats = plan.state_floats();
  const auto pieces_for = [&](const AttentionTask& task) {  // those that its tokens see
    const auto tokens = static_cast<int32_t>(task.tokens);
    const auto end = static_cast<int32_t>(task.first_position) + tokens;
    return pieces_of({.q_len = tokens, .kv_len = end}, args.sliding_window, plan.piece_keys);
  };
  pool_.parallel_for(tasks * plan.pieces, [&](int64_t index, int thread) {
    float* scratch = scratch_.as<float>().data() + thread * kAttentionScratch;
    AttentionTask task = plan.task(args, index / plan.pieces, scratch);
    const PieceRange range = pieces_for(task);
    const int64_t piece = index % plan.pieces;
    if (piece < range.count) {
      task.piece = range.first + piece;
      task.partial = partials_.as<float>().data() + index * floats;
      kernels_.attention(task);
    }
  });
  pool_.parallel_for(tasks, [&](int64_t index, int thread) {
    float* scratch = scratch_.as<float>().data() + thread * kAttentionScratch;
    const AttentionTask task = plan.task(args, index, scratch);
    float* partials = partials_.as<float>().data() + index * plan.pieces * floats;
    kernels_.merge_attention(task, partials, pieces_for(task).count, floats);
  });
}

}  // namespace nibble::cpu
