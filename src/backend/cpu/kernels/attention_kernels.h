#pragma once

// Attention over BF16, FP8, INT8 and INT4 caches: what tiles of BF16 products do on CPUs that have
// them (amx/amx_attention.h), lane by lane. The rules that give the same bits everywhere:
// - Queries are rounded to BF16. Keys and values enter as BF16 numbers, which E4M3 codes are, too,
//   or as their codes; a token's scale multiplies its score or weight, a layer's the scale of all
//   scores or the result.
// - Queries that meet codes are INT8 codes themselves, whose products are exact in integers
//   (attention_queries.h), and INT4 keys become such codes (attention_keys.h).
// - Rows of latent attention in codes become BF16 numbers with their scales (attention_widen.h),
// and
//   are key and value alike.
// - Values are multiplied as BF16 numbers: INT8 codes, and what INT4 codes and their offset make in
//   units of the scale (code_values). Products of BF16 numbers sum blocks of 32 elements: two sums
//   from 0, of the even and of the odd elements (values of INT8 and INT4 caches: of the first and
//   of the second 16), by fused multiply-adds in order; their sum is then added to the total.
// - Keys come in blocks of 64 from multiples of 64 on. A row's weights are 2^(score - top), where
//   the subtraction is fused with the scaling and rounded to 15 binary places (weight_of), or to 7
//   and times the value's scale (code_weight); top becomes the largest score of a block that has
//   one 32 or more above it, so that sums are rescaled rarely. A score that is not finite makes the
//   row NaN. AttentionForm::kShared: top is the next whole number.
// - Sums of weights are kept per lane, key modulo 16 (AttentionForm::kShared: of rounded weights,
//   two neighbours of 32 keys to a lane; INT8 and INT4 caches: of what the values are multiplied
//   with, times 1 / scale in BF16, the second 16 of 32 keys first), and added at the end of a piece
//   of 2048 keys (latent attention: 256).
// Keys that a row does not see have weight 0 and change no bit: a row's result depends on its own
// position and the cache alone.

#include "backend/cpu/kernels/attention_f32.h"
#include "backend/cpu/kernels/attention_products.h"
#include "backend/cpu/kernels/attention_queries.h"
#include "backend/cpu/kernels/attention_weights.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kTileRowCount = 48;  // rows whose scores are kept at a time

struct QueryRows {
  float* q;        // BF16 caches: [rows][head_dim padded to 32]
  int32_t* pairs;  // the others: [rows][head_dim / 2] of codes
  int32_t* bias;   // [rows]: what the bias of keys in pairs adds to a sum, negative
  float* unit;     // [rows]: of codes
  float* sums;     // [rows][16]: weights by lane
  float* shift;    // [rows]: ExponentRange::kBase - top
  float* scores;   // [kTileRowCount][kKeyBlock], then weights
  float* acc;      // [rows][head_dim padded to 16]
};

template <int kCode>
void load_queries(const AttentionTask& task, const QueryRows& rows) {
  const int64_t dim = task.kv.head_dim;
  const int64_t width = round_up(dim, kDotBlock);
  for (int64_t r = 0; r < task.tokens * task.group; ++r) {
    if constexpr (kCode == 1) {
      load_query(task, r, width, rows.q + r * width);
    } else {
      const QueryCodes query(task, r);
      pair_queries<kCode == 2 ? 2 : 4>(query.codes, dim, rows.pairs + r * dim / 2);
      rows.bias[r] = kCode == 2 ? -query.sum * kInt8Bias : 0;
      rows.unit[r] = query.unit;
    }
  }
}

/// Keys of a block that row r sees.
inline KeyRange keys_seen(const AttentionTask& task, const PackRange& pack, int64_t r) {
  const int64_t position = task.first_position + r / task.group;
  return {larger(first_visible(task, position) - pack.at, pack.range[0]),
          smaller(position + 1 - pack.at, pack.range[1])};
}

/// A block of keys and the rows of a task.
template <int kCode, bool kWholeTops>
class BlockStep {
 public:
  /// narrow: rows of keys and values that the block does not hold yet; a few of their numbers at a
  /// time are loaded for the few rows of the task, and stay in the first cache. Null: it holds
  /// them.
  BlockStep(const AttentionTask& task,
            const KeyBlock& block,
            const QueryRows& rows,
            const PackRange& pack,
            RowPrefetch& ahead,
            const KvRows* narrow)
      : task_(task),
        block_(block),
        rows_(rows),
        pack_(pack),
        ahead_(ahead),
        narrow_(narrow),
        dim_(round_up(task.kv.head_dim, 16)),
        value_dim_(round_up(task.kv.value_dim, 16)),
        width_(round_up(task.kv.head_dim, kDotBlock)) {}

  /// Folds the block into all rows, a few at a time, so that their scores stay in the first cache.
  void run() {
    const int64_t count = task_.tokens * task_.group;
    for (int64_t begin = 0; begin < count; begin += kTileRowCount) {
      find_groups(begin, smaller(count, begin + kTileRowCount));
      scores_ = rows_.scores - begin * kKeyBlock;
      score();
      for (int64_t i = 0; i < num_groups_; ++i) {
        weigh(groups_[i]);
      }
      add_values();
    }
  }

 private:
  /// Rows whose products share what is loaded of the keys.
  struct RowGroup {
    int64_t first;
    int64_t count;
    KeyRange keys;
  };

  void find_groups(int64_t begin, int64_t end) {
    num_groups_ = 0;
    for (int64_t r = begin; r < end; r += kProductRows) {
      const int64_t last = smaller(end, r + kProductRows);
      const KeyRange keys = seen_by(r, last);
      if (keys.begin < keys.end) {
        groups_[num_groups_++] = {r, last - r, keys};
      }
    }
  }

  /// Keys that rows first .. last-1 see.
  [[nodiscard]] KeyRange seen_by(int64_t first, int64_t last) const {
    const int64_t begin = keys_seen(task_, pack_, first).begin;
    const int64_t end = keys_seen(task_, pack_, last - 1).end;
    return {begin / kDotBlock * kDotBlock, begin < end ? round_up(end, kDotBlock) : 0};
  }

  void score() {
    if constexpr (kCode != 1) {
      for (int64_t i = 0; i < num_groups_; ++i) {
        score_pairs(groups_[i]);
      }
      return;
    }
    score_dims<true>(0);
    for (int64_t d = kDotBlock; d < width_; d += kDotBlock) {
      score_dims<false>(d);
    }
  }

  void score_pairs(const RowGroup& group) {
    const int64_t r = group.first;
    const int64_t pairs = task_.kv.head_dim / 2;
    const PairProduct p{rows_.pairs + r * pairs,
                        pairs,
                        block_.key_pairs + group.keys.begin,
                        kKeyBlock,
                        rows_.bias + r,
                        rows_.unit + r,
                        scores_ + r * kKeyBlock + group.keys.begin,
                        kKeyBlock};
    multiply_pair_rows(p, group.count, group.keys.end - group.keys.begin);
  }

  /// Adds the products of dims d .. d + 31, which stay in the first cache, to all rows' scores.
  template <bool kFirst>
  void score_dims(int64_t d) {
    const float* dims = block_.keys + d * kKeyBlock;
    if (narrow_ != nullptr) {
      ahead_.next(2);
      load_key_dims(task_, pack_, *narrow_, d, block_);
      dims = block_.keys;
    }
    for (int64_t i = 0; i < num_groups_; ++i) {
      const auto& [r, count, keys] = groups_[i];
      const Product p{rows_.q + r * width_ + d,
                      width_,
                      dims + keys.begin,
                      kKeyBlock,
                      scores_ + r * kKeyBlock + keys.begin,
                      kKeyBlock};
      multiply_rows<kFirst, Halves::kEvenAndOdd>(p, count, keys.end - keys.begin);
    }
  }

  void weigh(const RowGroup& group) {
    for (int64_t r = group.first; r < group.first + group.count; ++r) {
      ahead_.next(2);
      const KeyRange seen = keys_seen(task_, pack_, r);
      float* scores = scores_ + r * kKeyBlock;
      if (seen.begin >= seen.end) {
        __builtin_memset(scores, 0, kKeyBlock * sizeof(float));
        continue;
      }
      const BlockRow row{seen.begin,           seen.end,       scores, rows_.sums + r * 16,
                         rows_.acc + r * dim_, rows_.shift + r};
      weigh_row<kCode, kWholeTops>(block_, group.keys, row, dim_);
    }
  }

  /// A few columns of values at a time, which stay in the first cache for all rows.
  void add_values() {
    for (int64_t d = 0; d < value_dim_; d += kValueColumns) {
      const int64_t columns = smaller(kValueColumns, value_dim_ - d);
      if (narrow_ != nullptr) {
        load_value_columns(task_, pack_, *narrow_, d, block_);
        add_columns({block_.values, kValueColumns}, d, columns);
      } else {
        add_columns({block_.values + d, dim_}, d, columns);
      }
    }
  }

  /// Where columns of values begin, and how far apart rows are.
  struct Columns {
    const float* values;
    int64_t stride;
  };

  void add_columns(const Columns& from, int64_t d, int64_t columns) {
    constexpr Halves kHalves = kCode == 1 ? Halves::kEvenAndOdd : Halves::kFirstAndSecond;
    for (int64_t j = 0; j < kKeyBlock; j += kDotBlock) {
      for (int64_t i = 0; i < num_groups_; ++i) {
        const auto& [r, count, keys] = groups_[i];
        if (j < keys.begin || j >= keys.end) {
          continue;
        }
        ahead_.next(2);
        const Product p{scores_ + r * kKeyBlock + j,   kKeyBlock,
                        from.values + j * from.stride, from.stride,
                        rows_.acc + r * dim_ + d,      dim_};
        multiply_rows<false, kHalves>(p, count, columns);
      }
    }
  }

  const AttentionTask& task_;
  const KeyBlock& block_;
  const QueryRows& rows_;
  const PackRange& pack_;
  RowPrefetch& ahead_;
  const KvRows* narrow_;
  int64_t dim_;              // of a row of values
  int64_t value_dim_;        // numbers of it that are multiplied
  int64_t width_;            // of a row of queries
  float* scores_ = nullptr;  // of row 0
  RowGroup groups_[(kTileRowCount + kProductRows - 1) / kProductRows];
  int64_t num_groups_ = 0;
};

/// Sums over the keys first .. end-1, which lie in one piece.
template <int kCode>
void sum_piece(const AttentionTask& task,
               const int64_t (&keys)[2],
               const RowStates& states,
               QueryRows& queries,
               KeyBlock& block) {
  const int64_t dim = task.kv.head_dim;
  const int64_t padded_dim = round_up(dim, 16);
  const int64_t rows = task.tokens * task.group;
  clear_states(states, rows, padded_dim);
  queries.acc = states.acc;
  for (int64_t r = 0; r < rows; ++r) {
    queries.shift[r] = ExponentRange<kCode>::kBase - kLowest;
  }
  __builtin_memset(queries.sums, 0, static_cast<size_t>(rows) * 64);
  BlockWalk walk(task, keys);
  walk.each([&](const PackRange& pack, KvRows& found, RowPrefetch& ahead) {
    if (kCode == 1 && task.kv.widened()) {
      widen_block(task.kv, pack, block.wide, found);
    }
    load_params<kCode>(task, pack, found, block);
    if constexpr (kCode == 1) {
      const bool narrow = task.tokens == 1 && rows <= kTileRowCount;
      if (!narrow) {
        load_keys<kCode>(task, pack, found, block, ahead);
        load_values<kCode>(task, pack, found, block, ahead);
      }
      if (task.tokens > 1) {
        contain_values(dim, pack.range, block);
      }
      const KvRows* unpacked = narrow ? &found : nullptr;
      if (task.whole_tops) {
        return BlockStep<kCode, true>(task, block, queries, pack, ahead, unpacked).run();
      }
      return BlockStep<kCode, false>(task, block, queries, pack, ahead, unpacked).run();
    }
    load_keys<kCode>(task, pack, found, block, ahead);
    load_values<kCode>(task, pack, found, block, ahead);
    BlockStep<kCode, false>(task, block, queries, pack, ahead, nullptr).run();
  });
  for (int64_t r = 0; r < rows; ++r) {
    states.top[r] = ExponentRange<kCode>::kBase - queries.shift[r];
    states.sum[r] = Simd::reduce_add(Simd::load(queries.sums + r * 16));
  }
}

template <int kCode>
void attention_of(const AttentionTask& task) {
  const int64_t padded_dim = round_up(task.kv.head_dim, 16);
  const int64_t width = round_up(task.kv.head_dim, kDotBlock);
  const int64_t rows = task.tokens * task.group;
  float* at = task.scratch;
  const auto take = [&](int64_t floats) {
    float* memory = at;
    at += round_up(floats, 16);
    return memory;
  };
  const auto take_ints = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(count)); };
  KeyBlock block;
  block.keys = take(kKeyBlock * width);
  block.key_pairs = reinterpret_cast<int32_t*>(block.keys);
  block.values = take(kKeyBlock * larger(padded_dim, kValueColumns));
  block.wide = reinterpret_cast<uint8_t*>(
      take(kCode == 1 && task.kv.widened() ? kKeyBlock * task.kv.head_dim : 0));
  block.score_scale = take(kKeyBlock);
  block.value_log = take_ints(kKeyBlock);
  block.value_inverse = take(kKeyBlock);
  block.value_offset = take(kKeyBlock);
  QueryRows queries;
  queries.q = take(rows * width);
  queries.pairs = reinterpret_cast<int32_t*>(queries.q);
  queries.bias = take_ints(rows);
  queries.unit = take(rows);
  queries.sums = take(rows * 16);
  queries.shift = take(rows);
  queries.scores = take(kTileRowCount * kKeyBlock);
  __builtin_memset(block.keys, 0, static_cast<size_t>(kKeyBlock * width) * 4);
  load_queries<kCode>(task, queries);
  float* memory = take(attention_states_floats(rows, task.kv.head_dim));
  in_pieces(task, memory, [&](int64_t first, int64_t end, const RowStates& total, bool is_first) {
    const RowStates piece = is_first ? total : states_at(at, rows, padded_dim);
    sum_piece<kCode>(task, {first, end}, piece, queries, block);
    if (!is_first) {
      merge_states(total, piece, rows, padded_dim);
    }
  });
}

}  // namespace
}  // namespace nibble::cpu
