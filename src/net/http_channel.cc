#include "net/http_channel.h"

#include <utility>

#include <boost/asio.hpp>

namespace nibble {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

HttpChannel::Clock::duration seconds(double value) {
  return std::chrono::duration_cast<HttpChannel::Clock::duration>(
      std::chrono::duration<double>(value));
}

}  // namespace

std::string HttpChannel::request_text() const {
  std::string out = fmt::format("{} {}{} HTTP/1.1\r\nHost: {}\r\n", call_.method, owner_.path,
                                call_.target, owner_.authority);
  for (const HttpHeader& header : call_.headers) {
    out += fmt::format("{}: {}\r\n", header.name, header.value);
  }
  if (call_.method != "GET") {
    out +=
        fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n", call_.body.size());
  }
  return out + "\r\n" + call_.body;
}

void HttpChannel::start(uint64_t number, HttpCall call) {
  number_ = number;
  call_ = std::move(call);
  out_ = request_text();
  busy_ = true;
  reused_ = socket_.is_open();
  if (reused_) {
    send();
  } else {
    connect(0);
  }
}

void HttpChannel::connect(size_t which) {
  connecting_ = true;
  deadline_ = Clock::now() + seconds(owner_.options.connect_s);
  const auto handler = [self = shared_from_this(), which, epoch = epoch_](const error_code& error) {
    if (!self->busy_ || self->epoch_ != epoch) {
      return;
    }
    if (!error) {
      error_code ignored;
      self->socket_.set_option(tcp::no_delay(true), ignored);
      std::swap(self->owner_.endpoints.front(), self->owner_.endpoints[which]);
      self->send();
      return;
    }
    self->close();
    if (which + 1 < self->owner_.endpoints.size()) {
      self->connect(which + 1);
      return;
    }
    self->end(make_error(StatusCode::kUnavailable, "cannot reach {}: {}", self->owner_.authority,
                         error.message()));
  };
  socket_.async_connect(owner_.endpoints[which], handler);
}

void HttpChannel::send() {
  connecting_ = false;
  heard_ = false;
  writing_ = true;
  deadline_ = Clock::now() + seconds(owner_.options.stall_s);
  parser_ = std::make_unique<HttpResponseParser>(HttpResponseParser::Sinks{
      .on_head = call_.on_head, .on_body = [this](std::string_view bytes) {
        if (busy_ && call_.on_body) {
          call_.on_body(bytes, Clock::now());
        }
      }});
  asio::async_write(
      socket_, asio::buffer(out_),
      [self = shared_from_this(), epoch = epoch_](const error_code& /*error*/, size_t) {
        // A server that closes its side is noticed by reading.
        self->writing_ = self->writing_ && self->epoch_ != epoch;
      });
  read();
}

void HttpChannel::read() {
  const auto handler = [self = shared_from_this(), epoch = epoch_](const error_code& error,
                                                                   size_t count) {
    if (!self->busy_ || self->epoch_ != epoch) {
      return;
    }
    if (error) {
      self->on_read_end(error);
    } else {
      self->take({self->buffer_.data(), count});
    }
  };
  socket_.async_read_some(asio::buffer(buffer_), handler);
}

void HttpChannel::on_read_end(const error_code& error) {
  if (reused_ && !heard_) {  // the server had closed the connection that was kept
    close();
    reused_ = false;
    connect(0);
    return;
  }
  Status status = parser_->finish();
  if (!status.ok() && error != asio::error::eof) {
    status = status.with_context(error.message());
  }
  close();
  end(status);
}

void HttpChannel::take(std::string_view bytes) {
  heard_ = true;
  deadline_ = Clock::now() + seconds(owner_.options.stall_s);
  const uint64_t epoch = epoch_;
  const Status status = parser_->push(bytes);
  if (!busy_ || epoch_ != epoch) {
    return;  // a callback cancelled the call
  }
  if (!status.ok()) {
    close();
    end(status);
  } else if (parser_->done()) {
    if (!parser_->keeps_alive() || writing_) {  // it may answer before it has read all
      close();
    }
    end({});
  } else {
    read();
  }
}

void HttpChannel::check(Clock::time_point now) {
  if (!busy_ || now < deadline_) {
    return;
  }
  const Status status =
      connecting_
          ? make_error(StatusCode::kUnavailable, "cannot reach {}: no connection within {} s",
                       owner_.authority, owner_.options.connect_s)
          : make_error(StatusCode::kUnavailable, "the server sent {} for {} s",
                       heard_ ? "no more" : "nothing", owner_.options.stall_s);
  close();
  end(status);
}

void HttpChannel::end(const Status& status) {
  if (!std::exchange(busy_, false)) {
    return;
  }
  if (status.code() == StatusCode::kCancelled) {
    close();
  }
  reusable_ = socket_.is_open();
  const auto on_end = std::move(call_.on_end);
  const auto self = shared_from_this();
  owner_.on_free(self);
  if (on_end) {
    on_end(status);
  }
}

void HttpChannel::close() {
  ++epoch_;
  error_code ignored;
  socket_.close(ignored);
}

}  // namespace nibble
