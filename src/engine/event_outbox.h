#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "engine/sequence.h"

namespace nibble {

/// The events of a step. All are handed over when the last of them is known: threads that wait for
/// events then wake once a step instead of once a token.
class EventOutbox final {
 public:
  /// For the one who made `request`, which must live until deliver(), or be kept until then.
  void add(const Request& request, TokenEvent event) {
    events_.emplace_back(&request, std::move(event));
  }
  /// A sequence that is over, with its request.
  void keep(std::unique_ptr<Sequence> sequence) { ended_.push_back(std::move(sequence)); }

  void deliver() {
    for (auto& [request, event] : events_) {
      request->on_event(std::move(event));
    }
    events_.clear();
    ended_.clear();
  }

 private:
  std::vector<std::pair<const Request*, TokenEvent>> events_;
  std::vector<std::unique_ptr<Sequence>> ended_;
};

}  // namespace nibble
