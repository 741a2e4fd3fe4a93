#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backend/prepared_gemm.h"
#include "base/check.h"

namespace nibble {

/// Rows of a product of heads: head h multiplies its numbers of each row of x, `x_head` behind
/// those of the head before, and writes them `y_head` behind.
///   x [m, ...], rows x_stride apart; y [m, ...], rows y_stride apart
struct HeadsArgs {
  ConstActivations x;
  int64_t x_stride = 0;
  int64_t x_head = 0;
  int64_t m = 0;
  Activations y;
  int64_t y_stride = 0;
  int64_t y_head = 0;
};

/// A matrix for each head of an attention layer, packed for one kernel: y_h = x_h · dequant(w_h)ᵀ.
/// Where x_head is 0 all heads multiply the same numbers.
class PreparedHeads {
 public:
  virtual ~PreparedHeads() = default;
  virtual void run(const HeadsArgs& args) = 0;
  /// The same with matrices that are not transposed: y_h = x_h · dequant(w_h), of as many numbers
  /// as matrices have columns. Only where has_transposed().
  virtual void run_transposed(const HeadsArgs& /*args*/) {
    CHECK_MSG(false, "these heads are multiplied in one direction alone");
  }
  [[nodiscard]] virtual bool has_transposed() const { return false; }
  [[nodiscard]] virtual int64_t weight_bytes() const = 0;
};

/// The heads one after the other, each a product as any other.
class HeadByHead final : public PreparedHeads {
 public:
  explicit HeadByHead(std::vector<std::unique_ptr<PreparedGemm>> heads)
      : heads_(std::move(heads)) {}

  void run(const HeadsArgs& args) override {
    for (size_t head = 0; head < heads_.size(); ++head) {
      const auto index = static_cast<int64_t>(head);
      heads_[head]->run({.x = args.x.at(index * args.x_head),
                         .x_stride = args.x_stride,
                         .m = args.m,
                         .y = args.y.at(index * args.y_head),
                         .y_stride = args.y_stride});
    }
  }
  [[nodiscard]] int64_t weight_bytes() const override {
    int64_t bytes = 0;
    for (const auto& head : heads_) {
      bytes += head->weight_bytes();
    }
    return bytes;
  }

 private:
  std::vector<std::unique_ptr<PreparedGemm>> heads_;
};

}  // namespace nibble
