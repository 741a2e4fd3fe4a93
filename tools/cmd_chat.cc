#include <cerrno>
#include <csignal>
#include <cstdio>
#include <memory>
#include <utility>

#include <poll.h>
#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "answer.h"
#include "base/json.h"
#include "command.h"
#include "model_flags.h"

namespace nibble {

void add_chat_command(CLI::App& app, CommandContext& context);

namespace {

constexpr const char* kHelp =
    "/reset  forget the conversation\n"
    "/quit   leave (so does /exit, and Ctrl-D)\n"
    "/help   this text\n"
    "Ctrl-C stops the answer that is being written, or drops the line being typed.\n";

struct ChatFlags {
  ModelFlags model;
  AnswerFlags answer;
  std::string system;
};

void say(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// Ctrl-C as a readable descriptor. Blocks SIGINT for this thread and those it starts.
class Interrupts final {
 public:
  Interrupts() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
    fd_ = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    CHECK(fd_ >= 0);
  }
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  ~Interrupts() {
    close(fd_);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  [[nodiscard]] int fd() const { return fd_; }
  // Forgets signals that came; true if there were any.
  bool take() {
    signalfd_siginfo info{};
    bool any = false;
    while (read(fd_, &info, sizeof info) == sizeof info) {
      any = true;
    }
    return any;
  }

 private:
  int fd_ = -1;
  sigset_t before_{};
};

// Lines of standard input, given up at Ctrl-C.
class LineReader final {
 public:
  enum class Outcome { kLine, kInterrupted, kEnd };

  explicit LineReader(Interrupts& interrupts) : interrupts_(interrupts) {}

  // Reads the next line into `line`. Ctrl-C drops what was typed of it.
  Outcome next(std::string& line) {
    while (true) {
      if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
        line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return Outcome::kLine;
      }
      const Outcome outcome = fill();
      if (outcome == Outcome::kEnd && !buffer_.empty()) {
        line = std::exchange(buffer_, "");
        return Outcome::kLine;
      }
      if (outcome != Outcome::kLine) {
        return outcome;
      }
    }
  }

 private:
  // Reads what is there: kLine when something came.
  Outcome fill() {
    pollfd fds[] = {{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0},
                    {.fd = interrupts_.fd(), .events = POLLIN, .revents = 0}};
    while (poll(fds, 2, -1) < 0) {
      if (errno != EINTR) {
        return Outcome::kEnd;
      }
    }
    if (interrupts_.take()) {
      buffer_.clear();
      return Outcome::kInterrupted;
    }
    char block[4096];
    const ssize_t count = read(STDIN_FILENO, block, sizeof block);
    if (count <= 0) {
      return Outcome::kEnd;
    }
    buffer_.append(block, static_cast<size_t>(count));
    return Outcome::kLine;
  }

  Interrupts& interrupts_;
  std::string buffer_;
};

class Conversation final {
 public:
  Conversation(ServingSession& session, const ChatFlags& flags, Interrupts& interrupts)
      : session_(session), flags_(flags), interrupts_(interrupts) {
    reset();
  }

  void reset() {
    messages_.clear();
    if (!flags_.system.empty()) {
      add("system", flags_.system);
    }
  }

  // One turn. A turn that fails leaves the conversation as it was.
  Status answer(const std::string& line) {
    add("user", line);
    auto result = complete();
    if (!result.ok()) {
      messages_.pop_back();
      return result.status();
    }
    add("assistant", result->text);
    say(result->finish_reason == "cancelled" ? " [stopped]\n" : "\n");
    if (result->finish_reason == "length") {
      say("[cut off: --max-tokens or the model's context is reached]\n");
    }
    return {};
  }

 private:
  void add(const char* role, const std::string& content) {
    messages_.push_back(Json::object({{"role", role}, {"content", content}}));
  }

  Result<Answer> complete() {
    const Tokenizer& tokenizer = *session_.tokenizer;
    NIBBLE_ASSIGN_OR_RETURN(
        const std::string prompt,
        session_.chat_template->render({.messages = messages_,
                                        .generation_prompt = GenerationPrompt::kAdd,
                                        .bos_token = optional_text(tokenizer.bos_token()),
                                        .eos_token = optional_text(tokenizer.eos_token())}));
    NIBBLE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                            tokenizer.encode(prompt, SpecialTokens::kParse));
    return ask(session_, {.prompt = std::move(tokens),
                          .max_tokens = flags_.answer.max_tokens,
                          .sampling = sampling_of(flags_.answer, session_.config, kTemperature),
                          .stop = flags_.answer.stop,
                          .on_text = say,
                          .interrupt_fd = interrupts_.fd()});
  }

  static std::optional<std::string> optional_text(const std::string& text) {
    return text.empty() ? std::nullopt : std::optional(text);
  }

  static constexpr double kTemperature = 0.7;

  ServingSession& session_;
  const ChatFlags& flags_;
  Interrupts& interrupts_;
  JsonArray messages_;
};

enum class Next { kContinue, kLeave };

// Does what the line says: a command, a turn, or nothing.
Result<Next> obey(const std::string& line, Conversation& conversation, bool terminal) {
  if (line == "/quit" || line == "/exit") {
    return Next::kLeave;
  }
  if (line == "/help") {
    say(kHelp);
  } else if (line == "/reset") {
    conversation.reset();
  } else if (line.starts_with("/")) {
    say(fmt::format("There is no command {}.\n{}", line, kHelp));
  } else if (line.find_first_not_of(" \t\r") != std::string::npos) {
    const Status status = conversation.answer(line);
    if (!status.ok() && !terminal) {
      return status;
    }
    if (!status.ok()) {
      say(fmt::format("{} (/reset starts again)\n", status.message()));
    }
  }
  return Next::kContinue;
}

Status run(const ChatFlags& flags) {
  Interrupts interrupts;  // before any thread is started
  NIBBLE_ASSIGN_OR_RETURN(ServingSession session, open_session(flags.model));
  if (interrupts.take()) {
    return make_error(StatusCode::kCancelled, "interrupted while the model was loaded");
  }
  if (!session.chat_template) {
    return session.no_template;
  }
  const bool terminal = isatty(STDIN_FILENO) == 1;
  if (terminal) {
    say(fmt::format("{} ({}). /help shows the commands.\n", session.model_name, session.scheme));
  }
  Conversation conversation(session, flags, interrupts);
  LineReader lines(interrupts);
  std::string line;
  while (true) {
    if (terminal) {
      say("> ");
    }
    const LineReader::Outcome outcome = lines.next(line);
    if (outcome == LineReader::Outcome::kInterrupted && terminal) {
      say("\n(Ctrl-D or /quit leaves)\n");
      continue;
    }
    if (outcome != LineReader::Outcome::kLine) {
      break;
    }
    NIBBLE_ASSIGN_OR_RETURN(const Next next, obey(line, conversation, terminal));
    if (next == Next::kLeave) {
      return {};
    }
    interrupts.take();
  }
  if (terminal) {
    say("\n");
  }
  return {};
}

}  // namespace

void add_chat_command(CLI::App& app, CommandContext& context) {
  constexpr int64_t kMaxTokens = 1024;
  auto flags = std::make_shared<ChatFlags>();
  CLI::App* command = app.add_subcommand("chat", "Talk with a model on the terminal");
  add_model_flags(*command, flags->model);
  command->add_option("--system", flags->system, "System message of the conversation");
  add_answer_flags(*command, flags->answer, kMaxTokens);
  command->footer(
      "/quit or Ctrl-D leaves, Ctrl-C stops the answer, /reset starts again, /help lists all "
      "commands.\nWithout --temperature and a default in generation_config.json, the temperature "
      "is 0.7.\n\n" +
      app.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
