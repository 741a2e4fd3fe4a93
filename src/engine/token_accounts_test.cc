#include "engine/token_accounts.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(TokenAccounts, CountTokensPerShare) {
  TokenAccounts accounts;
  accounts.enter(1);
  accounts.enter(2);
  accounts.charge(1, 30, 1);
  accounts.charge(2, 30, 3);
  EXPECT_EQ(accounts.served(1), 30);
  EXPECT_EQ(accounts.served(2), 10);
  EXPECT_EQ(accounts.clients(), 2);
}

TEST(TokenAccounts, IdleTimeIsNotSavedUp) {
  TokenAccounts accounts;
  accounts.enter(1);
  accounts.enter(2);
  accounts.charge(1, 1000, 1);
  accounts.charge(2, 400, 1);
  accounts.enter(3);  // comes late: like the least served
  EXPECT_EQ(accounts.served(3), 400);
  accounts.leave(2);
  accounts.charge(3, 1000, 1);
  accounts.enter(2);  // was away: what it had is less than what all others have by now
  EXPECT_EQ(accounts.served(2), 1000);
}

TEST(TokenAccounts, LeavingDoesNotWipeADebt) {
  TokenAccounts accounts;
  accounts.enter(1);
  accounts.enter(2);
  accounts.charge(1, 1000, 1);
  accounts.leave(1);
  accounts.enter(1);
  EXPECT_EQ(accounts.served(1), 1000);
  EXPECT_EQ(accounts.served(2), 0);
  accounts.enter(1);  // a second request of its
  accounts.leave(1);
  EXPECT_EQ(accounts.served(1), 1000);
  accounts.leave(1);
  accounts.leave(2);
  accounts.enter(1);  // nobody was there: all begin afresh
  EXPECT_EQ(accounts.served(1), 0);
}

}  // namespace
}  // namespace nibble
