#pragma once

#include <cstdint>
#include <unordered_map>

namespace nibble {

/// Tokens that the engine served to each client, so that those who wait are admitted in turns by
/// what they had: virtual token counters (Sheng et al., "Fairness in Serving Large Language
/// Models", OSDI 2024). A client that had nothing under way begins with what the least served of
/// the others has: idle time is not saved up, and a long past is not held against those who were
/// served in it.
class TokenAccounts final {
 public:
  /// A request of a client comes, or is gone.
  void enter(int64_t client);
  void leave(int64_t client);
  /// `tokens` were computed for one of its requests; `share` is what it is to have in proportion to
  /// others.
  void charge(int64_t client, double tokens, double share);
  /// What a client with requests was served, per share.
  [[nodiscard]] double served(int64_t client) const { return accounts_.at(client).served; }
  [[nodiscard]] int64_t clients() const { return static_cast<int64_t>(accounts_.size()); }

 private:
  struct Account {
    double served = 0;
    int64_t requests = 0;
  };

  std::unordered_map<int64_t, Account> accounts_;  // of clients with requests
  std::unordered_map<int64_t, double> past_;       // of the others, while there are any requests
};

}  // namespace nibble
