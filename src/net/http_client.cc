#include "net/http_client.h"

#include <unordered_map>
#include <utility>

#include <boost/asio.hpp>

#include "net/http_channel.h"

namespace nibble {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr size_t kFetchLimit = size_t{64} << 20;

class Client final : public HttpClient {
 public:
  explicit Client(HttpChannel::Owner owner) : owner_(std::move(owner)), tick_(io_) {
    owner_.on_free = [this](const std::shared_ptr<HttpChannel>& channel) { release(channel); };
  }

  ~Client() override {
    for (auto& [number, channel] : active_) {
      idle_.push_back(channel);
    }
    active_.clear();
    io_.stop();
  }

  uint64_t start(HttpCall call) override {
    const uint64_t number = ++calls_;
    std::shared_ptr<HttpChannel> channel;
    if (idle_.empty()) {
      channel = std::make_shared<HttpChannel>(io_, owner_);
    } else {
      channel = std::move(idle_.back());
      idle_.pop_back();
    }
    active_[number] = channel;
    arm();
    channel->start(number, std::move(call));
    return number;
  }

  void cancel(uint64_t number) override {
    if (const auto found = active_.find(number); found != active_.end()) {
      const auto channel = found->second;
      channel->end(make_error(StatusCode::kCancelled, "the request was cancelled"));
    }
  }

  void at(Clock::time_point when, std::function<void()> task) override {
    auto timer = std::make_shared<asio::steady_timer>(io_, when);
    timer->async_wait([timer, task = std::move(task)](const error_code& error) {
      if (!error) {
        task();
      }
    });
  }

  void run() override {
    io_.restart();
    io_.run();
  }

 private:
  void release(const std::shared_ptr<HttpChannel>& channel) {
    active_.erase(channel->number());
    if (channel->reusable()) {
      idle_.push_back(channel);
    }
    if (active_.empty()) {
      tick_.cancel();
    }
  }

  // Looks for calls whose time is over, as long as there are calls.
  void arm() {
    if (std::exchange(ticking_, true)) {
      return;
    }
    tick_.expires_after(kTick);
    tick_.async_wait([this](const error_code& /*cancelled when the last call ended*/) {
      ticking_ = false;
      std::vector<std::shared_ptr<HttpChannel>> channels;
      for (const auto& [number, channel] : active_) {
        channels.push_back(channel);
      }
      const auto now = Clock::now();
      for (const auto& channel : channels) {
        channel->check(now);
      }
      if (!active_.empty()) {
        arm();
      }
    });
  }

  asio::io_context io_{1};
  HttpChannel::Owner owner_;
  asio::steady_timer tick_;
  bool ticking_ = false;
  uint64_t calls_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<HttpChannel>> active_;
  std::vector<std::shared_ptr<HttpChannel>> idle_;
};

}  // namespace

Result<std::unique_ptr<HttpClient>> HttpClient::create(const Url& url,
                                                       const HttpClientOptions& options) {
  asio::io_context io;
  asio::ip::tcp::resolver resolver(io);
  error_code error;
  const auto found = resolver.resolve(url.host, std::to_string(url.port), error);
  if (error || found.empty()) {
    return make_error(StatusCode::kNotFound, "host {}: {}", url.host,
                      error ? error.message() : "it has no address");
  }
  HttpChannel::Owner owner{.options = options,
                           .endpoints = {},
                           .authority = url.authority(),
                           .path = url.path,
                           .on_free = nullptr};
  for (const auto& entry : found) {
    owner.endpoints.push_back(entry.endpoint());
  }
  return std::unique_ptr<HttpClient>(std::make_unique<Client>(std::move(owner)));
}

Result<HttpAnswer> fetch(HttpClient& client, HttpCall call) {
  HttpAnswer answer;
  Status outcome;
  uint64_t number = 0;
  call.on_head = [&](const HttpHead& head) { answer.head = head; };
  call.on_body = [&](std::string_view bytes, HttpCall::Time /*time*/) {
    if (answer.body.size() + bytes.size() > kFetchLimit) {
      client.cancel(number);
      return;
    }
    answer.body += bytes;
  };
  call.on_end = [&](const Status& status) { outcome = status; };
  number = client.start(std::move(call));
  client.run();
  if (outcome.code() == StatusCode::kCancelled) {
    return make_error(StatusCode::kCorrupt, "the server's answer is above {} bytes", kFetchLimit);
  }
  NIBBLE_RETURN_IF_ERROR(outcome);
  return answer;
}

}  // namespace nibble
