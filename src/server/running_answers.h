#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace nibble {

/// Answers that are being made, so that other requests can end them. Thread-safe.
class RunningAnswers final {
 public:
  using Flags = std::vector<std::shared_ptr<std::atomic<bool>>>;

  /// One of them, listed as long as this lives.
  class Entry final {
   public:
    Entry(std::shared_ptr<RunningAnswers> list, std::string id, Flags cancelled);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    /// Whether end() or end_all() of the list was its end.
    [[nodiscard]] bool ended() const { return ended_; }

   private:
    friend class RunningAnswers;
    void end();

    const std::shared_ptr<RunningAnswers> list_;
    const Flags cancelled_;  // of its choices
    std::atomic<bool> ended_{false};
    std::multimap<std::string, Entry*, std::less<>>::iterator place_;
  };

  /// Ends those of this id; how many there were.
  size_t end(std::string_view id);
  size_t end_all();

 private:
  std::mutex mutex_;
  std::multimap<std::string, Entry*, std::less<>> entries_;
};

}  // namespace nibble
