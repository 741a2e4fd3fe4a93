#pragma once

namespace nibble::cuda {

/// The items of a list as one of `takers` takes them: one of every `takers` in each turn, in one
/// direction and in the other by turns, so that where items shrink along the list, those who had
/// larger ones of a turn have smaller ones of the next.
class ItemTurns {
 public:
  __device__ __forceinline__ ItemTurns(int taker, int takers) : index_(taker), step_(takers) {
    ahead_ = 2 * (takers - taker) - 1;
  }
  [[nodiscard]] __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ void advance() {
    index_ += ahead_;
    ahead_ = 2 * step_ - ahead_;
  }

 private:
  int index_, step_, ahead_;
};

}  // namespace nibble::cuda
