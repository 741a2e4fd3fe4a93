#pragma once

// Where keys and values of a sequence lie in the cache.

#include "backend/cpu/kernels/common.h"

namespace nibble::cpu {
namespace {

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

/// Bytes of a row as it is multiplied.
template <int kCode>
int64_t multiplied_bytes(const KvLayout& kv) {
  return kCode == 1 ? 2 * kv.head_dim : kv.row_bytes;
}

/// One head's keys or values of a token. A key without parameters, where others have some, is BF16.
struct KvRow {
  const uint8_t* codes;
  const float* params;
};

/// Where the rows of a block lie.
struct KvRows {
  KvRow keys[kKeyBlock];
  KvRow values[kKeyBlock];
};

/// A key that is not coded, or not for this task.
inline KvRow residual_key(const AttentionTask& task, int64_t page, int64_t slot) {
  const KvLayout& kv = task.kv;
  const int64_t row = task.kv_head * kv.page_size + slot;
  return {kv.residual + task.residual_list[page] * kv.residual_page_bytes + row * kv.head_dim * 2,
          nullptr};
}

/// Rows of positions first .. last-1, from index `at` on.
inline void find_rows(
    const AttentionTask& task, int64_t first, int64_t last, int64_t at, KvRows& rows) {
  const KvLayout& kv = task.kv;
  const auto row_of = [&](const uint8_t* head, const KvHalf& half, int64_t slot) {
    const int64_t set = half.set_tokens == 1 ? slot : slot / half.set_tokens;
    return KvRow{head + half.rows + slot * kv.row_bytes,
                 reinterpret_cast<const float*>(head + half.sets + set * half.set_bytes)};
  };
  int64_t page = first / kv.page_size;
  int64_t slot = first % kv.page_size;
  const int64_t end = at + last - first;
  for (int64_t i = at; i < end; ++page, slot = 0) {
    const uint8_t* head =
        kv.pages + task.page_list[page] * kv.page_bytes + task.kv_head * kv.head_bytes;
    for (; slot < kv.page_size && i < end; ++slot, ++i) {
      rows.keys[i] = page * kv.page_size + slot < task.residual_from
                         ? row_of(head, kv.keys, slot)
                         : residual_key(task, page, slot);
      rows.values[i] = row_of(head, kv.values, slot);
    }
  }
}

inline int64_t first_visible(const AttentionTask& task, int64_t position) {
  return task.window > 0 ? larger(0, position - task.window + 1) : 0;
}

/// Stores a head of results at `out`, turned back and with the mean of values where the task says
/// so; changes `row`.
inline void store_result(const AttentionTask& task, float* row, int64_t out) {
  const int64_t dim = task.kv.head_dim;
  for (int64_t d = 0; task.value_step != nullptr && d < dim; ++d) {
    row[d] *= task.value_step[d];
  }
  if (task.turn_back != nullptr) {
    task.turn_back(row, dim);
  }
  for (int64_t d = 0; task.value_mean != nullptr && d < dim; ++d) {
    row[d] += task.value_mean[d];
  }
  in_vectors(dim, [&](int64_t i, int64_t lanes) {
    store_numbers(task.out, out + i, lanes, Simd::load(row + i));
  });
}

alignas(64) constexpr uint8_t kZeroRow[kMaxHeadDim * 4] = {};  // codes, or parameters of channels

/// Part of a block of keys: those in `range` exist, the groups of 32 from begin to end are packed.
struct PackRange {
  int64_t at;  // position of the block
  int64_t range[2];
  int64_t begin;
  int64_t end;
};

inline PackRange pack_range(const int64_t (&keys)[2], int64_t at) {
  PackRange pack{at, {larger(keys[0], at) - at, smaller(keys[1], at + kKeyBlock) - at}, 0, 0};
  pack.begin = pack.range[0] / 32 * 32;
  pack.end = round_up(pack.range[1], 32);
  return pack;
}

/// Where the rows of a block's keys lie; those that are not there are zeros.
inline void find_block(const AttentionTask& task, const PackRange& pack, KvRows& rows) {
  const KvRow none{kZeroRow, reinterpret_cast<const float*>(kZeroRow)};
  find_rows(task, pack.at + pack.range[0], pack.at + pack.range[1], pack.range[0], rows);
  for (int64_t j = pack.begin; j < pack.range[0]; ++j) {
    rows.keys[j] = rows.values[j] = none;
  }
  for (int64_t j = pack.range[1]; j < pack.end; ++j) {
    rows.keys[j] = rows.values[j] = none;
  }
}

inline void prefetch_bytes(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(from + i);
  }
  // GCC 12 drops calls of functions that do nothing but prefetch.
  __asm__ volatile("" : : "r"(from));
}

/// Asks for keys and values of positions first .. last-1, `last` at most `end`: pages lie anywhere,
/// so that the processor's own prefetching stops after each.
inline void prefetch_rows(const AttentionTask& task, int64_t first, int64_t last, int64_t end) {
  const KvLayout& kv = task.kv;
  last = smaller(last, end);
  for (int64_t t = first; t < last;) {
    const int64_t slot = t % kv.page_size;
    const int64_t count = smaller(last - t, kv.page_size - slot);
    const uint8_t* head =
        kv.pages + task.page_list[t / kv.page_size] * kv.page_bytes + task.kv_head * kv.head_bytes;
    for (const KvHalf* half : {&kv.keys, &kv.values}) {
      if (half == &kv.values && half->rows == kv.keys.rows) {
        break;  // rows of latent attention are both
      }
      prefetch_bytes(head + half->rows + slot * kv.row_bytes, count * kv.row_bytes);
      prefetch_bytes(head + half->sets + slot / half->set_tokens * half->set_bytes,
                     (count + half->set_tokens - 1) / half->set_tokens * half->set_bytes);
    }
    t += count;
  }
}

/// Asks for rows of a block a few at a time, between other work: so many can be on their way.
class RowPrefetch {
 public:
  RowPrefetch(const KvLayout& kv, const KvRows& rows, int64_t begin, int64_t end)
      : rows_(rows),
        bytes_(kv.row_bytes),
        has_params_(kv.values.set_bytes > 0),
        next_(begin),
        end_(end) {}

  void next(int64_t count) {
    for (const int64_t end = smaller(end_, next_ + count); next_ < end; ++next_) {
      prefetch(rows_.keys[next_]);
      if (rows_.values[next_].codes != rows_.keys[next_].codes) {  // as those of latents
        prefetch(rows_.values[next_]);
      }
    }
  }
  void finish() { next(kKeyBlock); }

 private:
  void prefetch(const KvRow& row) const {
    prefetch_bytes(row.codes, bytes_);
    if (has_params_) {
      __builtin_prefetch(row.params);
    }
  }

  const KvRows& rows_;
  int64_t bytes_;
  bool has_params_;
  int64_t next_;
  int64_t end_;
};

/// The blocks of keys first .. end-1, in order. Their rows are found two blocks before they are
/// loaded, so that they can be asked for meanwhile.
class BlockWalk {
 public:
  BlockWalk(const AttentionTask& task, const int64_t (&keys)[2])
      : task_(task), keys_{keys[0], keys[1]}, at_(keys[0] / kKeyBlock * kKeyBlock) {
    prefetch_rows(task, keys[0], at_ + kAhead * kKeyBlock, keys[1]);
    for (int64_t block = 0; block < kAhead; ++block) {
      find(at_ + block * kKeyBlock);
    }
  }

  /// visit(pack, rows, ahead) of each block; the visitor may change the rows.
  template <typename Visit>
  void each(const Visit& visit) {
    for (; at_ < keys_[1]; at_ += kKeyBlock) {
      const PackRange far = find(at_ + kAhead * kKeyBlock);
      RowPrefetch ahead(task_.kv, rows_of(far.at), far.range[0], far.range[1]);
      visit(pack_range(keys_, at_), rows_of(at_), ahead);
      ahead.finish();
    }
  }

 private:
  static constexpr int64_t kAhead = 2;

  KvRows& rows_of(int64_t at) { return rows_[at / kKeyBlock % (kAhead + 1)]; }

  PackRange find(int64_t at) {
    if (at >= keys_[1]) {
      return {at, {0, 0}, 0, 0};
    }
    const PackRange pack = pack_range(keys_, at);
    find_block(task_, pack, rows_of(at));
    return pack;
  }

  const AttentionTask& task_;
  int64_t keys_[2];
  int64_t at_;
  KvRows rows_[kAhead + 1];
};

}  // namespace
}  // namespace nibble::cpu
