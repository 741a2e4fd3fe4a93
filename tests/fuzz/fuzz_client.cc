// Everything that a server can answer: HTTP, server-sent events, and the JSON of the three APIs.
// What comes out must not depend on how the bytes were cut; bounded, and a failure says something.
// The first byte chooses the API and the size of the pieces.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "net/answer_reader.h"
#include "net/http_response.h"
#include "net/url.h"

namespace nibble {
namespace {

struct Read {
  std::string text;
  int64_t tokens = 0;
  int frames = 0;
  StatusCode code = StatusCode::kOk;

  bool operator==(const Read&) const = default;
};

Read read(std::string_view bytes, AnswerApi api, size_t step) {
  Read out;
  AnswerReader reader(api, [&](const AnswerFrame& frame) {
    ++out.frames;
    out.text += frame.text + "|" + frame.reasoning + "|" + frame.finish_reason + ";";
    out.tokens += frame.usage ? frame.usage->completion_tokens % 1000 : 0;
  });
  HttpResponseParser parser({.on_head = [&](const HttpHead& head) { reader.head(head); },
                             .on_body = [&](std::string_view body) { reader.body(body); }});
  Status status;
  for (size_t i = 0; i < bytes.size() && status.ok() && !parser.done(); i += step) {
    status = parser.push(bytes.substr(i, step));
  }
  if (status.ok() && !parser.done()) {
    status = parser.finish();
  }
  // Bytes behind the answer are an error only if they come with its end.
  if (parser.done()) {
    status = {};
  }
  if (status.ok()) {
    status = reader.finish();
  }
  CHECK(status.ok() != (status.code() != StatusCode::kOk));
  CHECK(status.ok() || !status.message().empty());
  out.code = status.code();
  return out;
}

}  // namespace
}  // namespace nibble

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble;  // NOLINT(google-build-using-namespace)
  if (size == 0) {
    return 0;
  }
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto api = static_cast<AnswerApi>((data[0] & 3) % 3);
  const Read whole = read(bytes, api, size);
  for (const size_t step : {size_t{1} + (data[0] >> 2), size_t{1}}) {
    const Read cut = read(bytes, api, step);
    // Which fault of a damaged answer is seen first may depend on the cut, that there is one not.
    CHECK((cut.code == StatusCode::kOk) == (whole.code == StatusCode::kOk));
    CHECK(whole.code != StatusCode::kOk || cut == whole);
  }
  if (const auto url = parse_url(bytes); url.ok()) {
    const auto again = parse_url(url->text());
    CHECK(again.ok() && again->text() == url->text());
  }
  return 0;
}
