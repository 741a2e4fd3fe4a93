#pragma once

#include <chrono>
#include <string>

#include "backend/cuda/uploader.h"

namespace nibble::cuda {

/// Where the time went in which the weights of a model got to the GPU: of the one thread that loads
/// it, in parts that do not overlap.
class LoadTimes final {
 public:
  /// Runs work that takes GPU memory, uploads and starts kernels. What `sent` says that uploads
  /// took meanwhile is theirs; the rest is counted as preparing().
  template <typename Work>
  auto prepare(const Uploader::Spent& sent, const Work& work) {
    const Clock::time_point start = Clock::now();
    const Seconds sent_before = sent.filling + sent.waiting;
    auto result = work();
    const Seconds uploading = sent.filling + sent.waiting - sent_before;
    preparing_ += Clock::now() - start - uploading;
    return result;
  }

  /// Runs work that waits for the GPU.
  template <typename Work>
  auto wait(const Work& work) {
    const Clock::time_point start = Clock::now();
    auto result = work();
    waiting_ += Clock::now() - start;
    return result;
  }

  [[nodiscard]] std::chrono::duration<double> preparing() const { return preparing_; }
  [[nodiscard]] std::chrono::duration<double> waiting() const { return waiting_; }
  /// One line for the log.
  [[nodiscard]] std::string text(const Uploader::Spent& sent) const;

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  Seconds preparing_{};
  Seconds waiting_{};
};

}  // namespace nibble::cuda
