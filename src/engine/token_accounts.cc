#include "engine/token_accounts.h"

#include <algorithm>

#include "base/check.h"

namespace nibble {

void TokenAccounts::enter(int64_t client) {
  const auto found = accounts_.find(client);
  if (found != accounts_.end()) {
    ++found->second.requests;
    return;
  }
  Account account{.requests = 1};
  if (!accounts_.empty()) {
    const auto least = std::ranges::min_element(
        accounts_, {}, [](const auto& other) { return other.second.served; });
    const auto past = past_.find(client);
    account.served = std::max(past == past_.end() ? 0 : past->second, least->second.served);
  }
  accounts_.emplace(client, account);
}

void TokenAccounts::leave(int64_t client) {
  const auto found = accounts_.find(client);
  CHECK(found != accounts_.end());
  if (--found->second.requests > 0) {
    return;
  }
  past_[client] = found->second.served;
  accounts_.erase(found);
  if (accounts_.empty()) {
    past_.clear();
  }
}

void TokenAccounts::charge(int64_t client, double tokens, double share) {
  CHECK_GT(share, 0.0);
  accounts_.at(client).served += tokens / share;
}

}  // namespace nibble
