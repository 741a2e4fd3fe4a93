#include "net/sse_parser.h"

#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

using Events = std::vector<std::pair<std::string, std::string>>;

// Parses `text` in pieces that end at these places.
Events parse(std::string_view text, const std::vector<size_t>& cuts) {
  Events events;
  SseParser parser([&](const SseEvent& event) { events.emplace_back(event.name, event.data); });
  size_t from = 0;
  for (const size_t cut : cuts) {
    EXPECT_TRUE(parser.push(text.substr(from, cut - from)).ok());
    from = cut;
  }
  EXPECT_TRUE(parser.push(text.substr(from)).ok());
  parser.finish();
  return events;
}

constexpr std::string_view kStream =
    "\xEF\xBB\xBF: ping\n\nevent: first\ndata: {\"a\":1}\n\ndata:no blank\r\ndata:  two\r\n\r\n"
    "id: 7\rdata\r\revent: lost\n\nretry: 10\ndata: [DONE]\n\n";

TEST(SseParser, FieldsCommentsAndLineEnds) {
  const Events wanted = {{"first", "{\"a\":1}"}, {"", "no blank\n two"}, {"", ""}, {"", "[DONE]"}};
  EXPECT_EQ(parse(kStream, {}), wanted);
}

TEST(SseParser, CutsChangeNothing) {
  const Events whole = parse(kStream, {});
  for (size_t i = 0; i <= kStream.size(); ++i) {
    for (size_t j = i; j <= kStream.size(); ++j) {
      ASSERT_EQ(parse(kStream, {i, j}), whole) << i << " " << j;
    }
  }
}

TEST(SseParser, AnEndWithoutAnEmptyLineCounts) {
  EXPECT_EQ(parse("data: [DONE]", {}), (Events{{"", "[DONE]"}}));
  EXPECT_EQ(parse("data: x\n", {}), (Events{{"", "x"}}));
  EXPECT_TRUE(parse(": nothing", {}).empty());
}

TEST(SseParser, EventsAreBounded) {
  SseParser line([](const SseEvent&) {}, 100);
  EXPECT_TRUE(line.push("data: " + std::string(90, 'x')).ok());
  EXPECT_EQ(line.push(std::string(10, 'x')).code(), StatusCode::kCorrupt);
  SseParser lines([](const SseEvent&) {}, 100);
  Status status;
  for (int i = 0; i < 200 && status.ok(); ++i) {
    status = lines.push("data: x\n");
  }
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace nibble
