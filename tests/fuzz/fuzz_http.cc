// Everything that a client can send: a whole request through the network library's parser, in two
// pieces, and a body through the parsers of the routes. The first byte chooses the route (of five
// kinds of bodies) and the strictness, and whether a head comes first; what is accepted must
// satisfy the promises of schema.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/parser.hpp>

#include "base/check.h"
#include "base/log.h"
#include "server/chat_body.h"
#include "server/http_message.h"
#include "server/http_text.h"
#include "server/schema.h"
#include "server/schema_embedding.h"
#include "text/text_stream.h"

namespace nibble {
namespace {

// The body of the request that `bytes` are, or nothing when they are none. They arrive in two
// pieces, as from a socket: the parser sees the unused rest of the first again with the second.
std::string body_of_request(std::string_view bytes) {
  boost::beast::http::request_parser<boost::beast::http::string_body> parser;
  parser.header_limit(32 << 10);
  parser.body_limit(64 << 10);
  parser.eager(true);
  boost::system::error_code error;
  size_t used = 0;
  for (const size_t end : {bytes.size() / 2, bytes.size()}) {
    while (used < end && !parser.is_done()) {
      const size_t read = parser.put(boost::asio::buffer(bytes.data() + used, end - used), error);
      used += read;
      if (read == 0 || error) {
        break;
      }
    }
  }
  if (!parser.is_header_done() || (error && error != boost::beast::http::error::need_more)) {
    return {};
  }
  HttpRequest request = to_http_request(parser.release());
  CHECK(!request.id.empty() && request.body.size() <= bytes.size());
  return std::move(request.body);
}

void check_body(std::string_view body, bool chat, Strictness strictness) {
  const SchemaOptions options{.strictness = strictness};
  const ParsedRequest parsed =
      chat ? parse_chat_request(body, options) : parse_completion_request(body, options);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    CHECK(Json::parse(error_json(*error)).ok());
    return;
  }
  const auto& request = std::get<GenerationRequest>(parsed);
  CHECK(request.n >= 1 && request.sampling.temperature >= 0 && request.sampling.top_p > 0);
  CHECK(!request.prompts.empty() || request.messages.is_array());
  StopFilter text(request.stop, request.include_stop ? StopText::kKeep : StopText::kOmit);
  const std::string shown = text.push(body) + text.finish();
  CHECK(text.stopped() || shown == body);
}

void check_embedding(std::string_view body, Strictness strictness) {
  const auto parsed = parse_embedding_request(body, strictness);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    CHECK(Json::parse(error_json(*error)).ok());
    return;
  }
  const auto& request = std::get<EmbeddingRequest>(parsed);
  CHECK(!request.inputs.empty() && request.dimensions.value_or(1) > 0);
  CHECK(request.truncate_prompt_tokens.value_or(1) != 0);
  for (const PromptInput& input : request.inputs) {
    const auto* ids = std::get_if<std::vector<int32_t>>(&input);
    CHECK(ids == nullptr || (!ids->empty() && std::ranges::min(*ids) >= 0));
  }
}

// Bodies that are translated into chats and completions: of messages, responses and /generate.
void check_translated(std::string_view text, int kind, Strictness strictness) {
  const auto object = parse_object(text);
  if (std::holds_alternative<ApiError>(object)) {
    return;
  }
  const Json& body = std::get<Json>(object);
  const ChatBody made = kind == 1   ? chat_of_messages(body, strictness)
                        : kind == 2 ? chat_of_responses(body, response_items(body), strictness)
                                    : completion_of_generate(body, strictness);
  if (const auto* error = std::get_if<ApiError>(&made)) {
    CHECK(error->message.size() < 1000 + text.size());
    CHECK(Json::parse(anthropic_error_json(*error)).ok());
    return;
  }
  const IgnoredFields& ignored = std::get<TranslatedBody>(made).ignored;
  CHECK(strictness == Strictness::kLenient || ignored.empty());
  CHECK(ignored.empty() || ignored.warning().size() < 1000);
  const std::string translated = std::get<TranslatedBody>(made).body.dump();
  CHECK(Json::parse(translated).ok());
  check_body(translated, kind != 3, Strictness::kStrict);
}

}  // namespace
}  // namespace nibble

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble;  // NOLINT(google-build-using-namespace)
  if (size == 0) {
    return 0;
  }
  set_log_level(LogLevel::kError);
  std::string body(reinterpret_cast<const char*>(data) + 1, size - 1);
  CHECK(percent_decode(body).size() <= body.size());
  CHECK(!usable_request_id(body).empty() && usable_request_id(body).size() <= 128);
  CHECK(content_coding({{"Content-Encoding", body}}).size() <= body.size());
  if ((data[0] & 4) != 0) {
    body = body_of_request(body);
  }
  const Strictness strictness = (data[0] & 2) != 0 ? Strictness::kStrict : Strictness::kLenient;
  const int kind = (data[0] >> 3) & 7;
  if (kind >= 1 && kind <= 3) {
    check_translated(body, kind, strictness);
  } else if (kind == 4) {
    check_embedding(body, strictness);
  } else {
    check_body(body, (data[0] & 1) != 0, strictness);
  }
  return 0;
}
