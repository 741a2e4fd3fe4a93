#include "net/http_response.h"

#include <optional>
#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/basic_parser.hpp>

namespace nibble {
namespace {

namespace beast_http = boost::beast::http;
using boost::beast::string_view;
using boost::system::error_code;

constexpr uint32_t kHeadLimit = 32 << 10;

std::string_view view(string_view text) { return {text.data(), text.size()}; }

}  // namespace

class HttpResponseParser::Parser final : public beast_http::basic_parser<false> {
 public:
  explicit Parser(const Sinks& sinks) : sinks_(sinks) {
    header_limit(kHeadLimit);
    body_limit(boost::none);
    eager(true);
  }

  [[nodiscard]] bool interim() const { return head_.status >= 100 && head_.status < 200; }

 private:
  void on_request_impl(beast_http::verb /*method*/,
                       string_view /*method_text*/,
                       string_view /*target*/,
                       int /*version*/,
                       error_code& error) override {
    error = {};
  }
  void on_response_impl(int status,
                        string_view /*reason*/,
                        int /*version*/,
                        error_code& error) override {
    head_.status = status;
    error = {};
  }
  void on_field_impl(beast_http::field name,
                     string_view /*name_text*/,
                     string_view value,
                     error_code& error) override {
    if (name == beast_http::field::content_type) {
      head_.content_type = view(value);
    } else if (name == beast_http::field::retry_after) {
      head_.retry_after = view(value);
    }
    error = {};
  }
  void on_header_impl(error_code& error) override {
    if (!interim() && sinks_.on_head) {
      sinks_.on_head(head_);
    }
    error = {};
  }
  void on_body_init_impl(const boost::optional<uint64_t>& /*length*/, error_code& error) override {
    error = {};
  }
  size_t on_body_impl(string_view body, error_code& error) override {
    sinks_.on_body(view(body));
    error = {};
    return body.size();
  }
  void on_chunk_header_impl(uint64_t /*size*/,
                            string_view /*extensions*/,
                            error_code& error) override {
    error = {};
  }
  size_t on_chunk_body_impl(uint64_t /*remain*/, string_view body, error_code& error) override {
    return on_body_impl(body, error);
  }
  void on_finish_impl(error_code& error) override { error = {}; }

  const Sinks& sinks_;
  HttpHead head_;
};

HttpResponseParser::HttpResponseParser(Sinks sinks)
    : sinks_(std::move(sinks)), parser_(std::make_unique<Parser>(sinks_)) {}

HttpResponseParser::~HttpResponseParser() = default;

Status HttpResponseParser::feed(std::string_view& bytes) {
  while (!bytes.empty()) {
    if (parser_->is_done() && parser_->interim()) {
      parser_ = std::make_unique<Parser>(sinks_);
    }
    if (parser_->is_done()) {
      return make_error(StatusCode::kCorrupt, "the server sent {} bytes after its answer",
                        bytes.size());
    }
    error_code error;
    const size_t used = parser_->put(boost::asio::buffer(bytes.data(), bytes.size()), error);
    bytes.remove_prefix(used);
    if (error == beast_http::error::need_more || (!error && used == 0)) {
      return {};
    }
    if (error) {
      return make_error(StatusCode::kCorrupt, "the server's answer is no HTTP: {}",
                        error.message());
    }
  }
  return {};
}

Status HttpResponseParser::push(std::string_view bytes) {
  if (held_.empty()) {
    NIBBLE_RETURN_IF_ERROR(feed(bytes));
    held_ = bytes;
  } else {
    held_ += bytes;
    std::string_view all = held_;
    NIBBLE_RETURN_IF_ERROR(feed(all));
    held_.erase(0, held_.size() - all.size());
  }
  if (held_.size() > kHeadLimit) {
    return make_error(StatusCode::kCorrupt, "the server's answer has a frame above {} bytes",
                      kHeadLimit);
  }
  return {};
}

Status HttpResponseParser::finish() {
  if (!parser_->is_done() && parser_->got_some() && held_.empty()) {
    error_code error;
    parser_->put_eof(error);
  }
  if (!parser_->is_done() || parser_->interim()) {
    return make_error(
        StatusCode::kUnavailable, "the server closed the connection {}",
        parser_->is_header_done() ? "in the middle of an answer" : "before it answered");
  }
  return {};
}

bool HttpResponseParser::done() const { return parser_->is_done() && !parser_->interim(); }

bool HttpResponseParser::keeps_alive() const { return done() && parser_->keep_alive(); }

}  // namespace nibble
