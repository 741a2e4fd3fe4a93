// Answers every request at once, as an OpenAI server streams: what `nibble bench serve` can do at
// most is measured against it, on a core of its own.
//   g++ -O2 -std=c++20 bench/speed/responder.cc -o build/responder
//   build/responder 8099 16 &
//   nibble bench serve --port 8099 --vocab-size 1000 --random-input-len 32 --random-output-len 16
//     --num-prompts 50000 --max-concurrency 256
// Arguments: port, tokens of an answer, each in a frame of its own.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

namespace {

std::string chunk(const std::string& text) {
  char size[16];
  std::snprintf(size, sizeof size, "%zx\r\n", text.size());
  return size + text + "\r\n";
}

std::string streamed_answer(int tokens) {
  std::string out =
      "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
  const std::string head = R"(data: {"id":"cmpl-1","object":"text_completion","model":"none",)";
  for (int i = 0; i < tokens; ++i) {
    out += chunk(head + R"("choices":[{"index":0,"text":" word","finish_reason":null}]})" + "\n\n");
  }
  out += chunk(head + R"("choices":[],"usage":{"prompt_tokens":32,"completion_tokens":)" +
               std::to_string(tokens) + "}}\n\n");
  return out + chunk("data: [DONE]\n\n") + "0\r\n\r\n";
}

std::string models_answer() {
  const std::string body = R"({"object":"list","data":[{"id":"none","object":"model"}]})";
  return "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

// Bytes of the first request in `text`; 0 while it has not all come.
size_t request_length(const std::string& text) {
  const size_t end = text.find("\r\n\r\n");
  if (end == std::string::npos) {
    return 0;
  }
  const size_t at = text.find("Content-Length: ");
  const size_t body = at < end ? std::strtoul(text.c_str() + at + 16, nullptr, 10) : 0;
  return text.size() >= end + 4 + body ? end + 4 + body : 0;
}

int listen_on(int port) {
  const int one = 1;
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener, 4096) != 0) {
    std::perror("responder");
    std::exit(1);
  }
  return listener;
}

}  // namespace

int main(int argc, char** argv) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const int listener = listen_on(argc > 1 ? std::atoi(argv[1]) : 8099);
  const std::string answer = streamed_answer(argc > 2 ? std::atoi(argv[2]) : 16);
  const std::string models = models_answer();
  const int poller = epoll_create1(0);
  epoll_event event{.events = EPOLLIN, .data = {.fd = listener}};
  epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
  std::unordered_map<int, std::string> received;
  epoll_event events[256];
  char block[65536];
  while (true) {
    const int count = epoll_wait(poller, events, 256, -1);
    for (int i = 0; i < count; ++i) {
      const int from = events[i].data.fd;
      if (from == listener) {
        const int made = accept(listener, nullptr, nullptr);
        const int one = 1;
        setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        event = {.events = EPOLLIN, .data = {.fd = made}};
        epoll_ctl(poller, EPOLL_CTL_ADD, made, &event);
        continue;
      }
      const ssize_t got = read(from, block, sizeof block);
      if (got <= 0) {
        close(from);
        received.erase(from);
        continue;
      }
      std::string& text = received[from];
      text.append(block, static_cast<size_t>(got));
      while (const size_t length = request_length(text)) {
        const std::string& reply = text.starts_with("GET") ? models : answer;
        if (write(from, reply.data(), reply.size()) < 0) {
          break;
        }
        text.erase(0, length);
      }
    }
  }
}
