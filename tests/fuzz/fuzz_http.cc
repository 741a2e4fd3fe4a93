// Everything that a client can send in a body, through the parsers of the routes. The first byte
// chooses the route and the strictness; what is accepted must satisfy the promises of schema.h.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/log.h"
#include "server/http_text.h"
#include "server/schema.h"
#include "text/text_stream.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble;  // NOLINT(google-build-using-namespace)
  if (size == 0) {
    return 0;
  }
  set_log_level(LogLevel::kError);
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const SchemaOptions options{.strictness =
                                  (data[0] & 2) != 0 ? Strictness::kStrict : Strictness::kLenient};
  const ParsedRequest parsed = (data[0] & 1) != 0 ? parse_chat_request(body, options)
                                                  : parse_completion_request(body, options);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    CHECK(Json::parse(error_json(*error)).ok());
  } else {
    const auto& request = std::get<GenerationRequest>(parsed);
    CHECK(request.n >= 1 && request.sampling.temperature >= 0 && request.sampling.top_p > 0);
    CHECK(!request.prompts.empty() || request.messages.is_array());
    StopFilter text(request.stop, request.include_stop ? StopText::kKeep : StopText::kOmit);
    const std::string shown = text.push(body) + text.finish();
    CHECK(text.stopped() || shown == body);
  }
  CHECK(percent_decode(body).size() <= body.size());
  CHECK(!usable_request_id(body).empty());
  return 0;
}
