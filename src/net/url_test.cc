#include "net/url.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(Url, Parts) {
  const auto url = parse_url("http://host.example:8123/prefix/v1/");
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->host, "host.example");
  EXPECT_EQ(url->port, 8123);
  EXPECT_EQ(url->path, "/prefix");
  EXPECT_EQ(url->text(), "http://host.example:8123/prefix");
}

TEST(Url, DefaultsAndShortForms) {
  EXPECT_EQ(parse_url("http://a")->port, 80);
  EXPECT_EQ(parse_url("http://a/v1")->path, "");
  EXPECT_EQ(parse_url("localhost:30000")->text(), "http://localhost:30000");
}

TEST(Url, AddressesOfIpv6) {
  const auto url = parse_url("http://[::1]:9/x");
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->host, "::1");
  EXPECT_EQ(url->authority(), "[::1]:9");
}

TEST(Url, RefusesWhatItCannotReach) {
  for (const char* text :
       {"", "http://", "http://:80", "ftp://a", "http://a:0", "http://a:65536", "http://a:8o",
        "http://u@a", "http://a b", "http://[::1", "http://[::1]x", "http://a/?q"}) {
    const auto url = parse_url(text);
    ASSERT_FALSE(url.ok()) << text;
    EXPECT_EQ(url.status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_NE(parse_url("https://a").status().message().find("proxy"), std::string::npos);
}

}  // namespace
}  // namespace nibble
