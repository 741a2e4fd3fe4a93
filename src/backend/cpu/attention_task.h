#pragma once

#include <cstdint>

namespace nibble::cpu {

// What the backend hands to the attention kernels. Plain structs: see kernel_table.h.

constexpr int64_t kMaxHeadDim = 576;
constexpr int64_t kQueryRows = 2048;  // query rows (token x head) of one attention task, at most
constexpr int64_t kKeyBlock = 64;     // keys of one step of the online softmax
constexpr int64_t kKeyChunk = 512;    // keys that are packed at a time for many query rows
constexpr int64_t kDotBlock = 32;     // elements of a product that are summed before the total
constexpr int64_t kKeyPiece = 2048;   // keys after which the sums of a row start afresh
// The same of latent attention, where a token has one head's row alone: a piece is what a thread
// takes of it.
constexpr int64_t kLatentPiece = 256;

/// Activations: F32 or BF16 numbers. Strides and offsets count numbers.
enum class Element : uint8_t { kF32, kBf16 };
struct Numbers {
  void* data = nullptr;
  Element type = Element::kF32;
};
struct ConstNumbers {
  const void* data = nullptr;
  Element type = Element::kF32;
};

constexpr int64_t kBf16Code = 1;    // KvCode::kBf16
constexpr int64_t kInt8Code = 2;    // KvCode::kInt8
constexpr int64_t kInt4Code = 3;    // KvCode::kInt4
constexpr int64_t kPageCode = 5;    // KvCode::kInt4Page
constexpr int64_t kStaticCode = 6;  // KvCode::kInt4Static

/// Where the keys, or the values, of a head lie, counted in bytes from where the head begins.
struct KvHalf {
  int64_t rows = 0;
  int64_t sets = 0;       // of parameters
  int64_t set_bytes = 0;  // of one; 0: none
  int64_t set_tokens = 1;
};

struct KvLayout {
  uint8_t* pages = nullptr;
  int64_t code = 0;    // KvCode
  int64_t kernel = 0;  // the code whose kernels read it: its own, or BF16's over widened rows
  int64_t page_size = 0;
  int64_t page_bytes = 0;
  int64_t head_bytes = 0;
  KvHalf keys;
  KvHalf values;
  int64_t row_bytes = 0;
  int64_t row_params = 0;  // f32 numbers that kernels read of a row; widened rows have none
  int64_t head_dim = 0;
  int64_t value_dim = 0;     // numbers of a result that mean something
  int64_t latent_rank = 0;   // KvView
  int64_t latent_group = 0;  // numbers of the latent that share parameters
  // Keys that have no codes yet, BF16 [page][head][page_size][head_dim]; null: there are none.
  const uint8_t* residual = nullptr;
  int64_t residual_page_bytes = 0;

  [[nodiscard]] constexpr bool widened() const { return kernel != code; }
};

/// The query heads of one KV head, for some consecutive tokens of a sequence.
struct AttentionTask {
  ConstNumbers q;  // row of the first token, first head of the group
  int64_t q_stride = 0;
  Numbers out;
  int64_t out_stride = 0;
  int64_t tokens = 0;
  int64_t group = 0;  // query heads that share the KV head; tokens * group <= kQueryRows
  float scale = 1.0F;
  float value_scale = 1.0F;      // multiplies the result
  const float* sinks = nullptr;  // [group] logits without values; null: none
  int64_t window = 0;            // 0: all
  bool whole_tops = false;       // AttentionForm::kShared
  void (*turn_back)(float* head, int64_t dim) = nullptr;  // of results, where heads are turned
  const float* value_mean = nullptr;                      // [head_dim], added to results at last
  const float* value_step = nullptr;                      // [head_dim], multiplies them at first
  int64_t first_position = 0;                             // of the first token
  KvLayout kv;
  int64_t kv_head = 0;
  const int32_t* page_list = nullptr;
  const int32_t* residual_list = nullptr;  // the same of kv.residual
  int64_t residual_from = INT64_MAX;       // keys from here on are read there
  float* scratch = nullptr;                // kAttentionScratch floats, 64-byte aligned
  int64_t piece_keys = kKeyPiece;          // of a piece, from a multiple of as many on
  // Null: all keys, results to out. Else only the keys of one piece, whose sums go here:
  // attention_states_floats(), not for F32 caches.
  float* partial = nullptr;
  int64_t piece = 0;
};

/// Sums over one piece of the keys, per row: [rows][padded head_dim], [rows] tops, [rows] sums.
static constexpr int64_t attention_states_floats(int64_t rows, int64_t head_dim) {
  return rows * ((head_dim + 15) / 16 * 16 + 2);
}

/// Floats that one attention task needs: keys and values, and for each row the query, the running
/// sums and those of the earlier pieces.
constexpr int64_t kAttentionScratch =
    (kKeyChunk + 4 * kQueryRows) * kMaxHeadDim + 64 * kQueryRows + 16 * kKeyChunk;

}  // namespace nibble::cpu
