#include <cstdio>
#include <map>
#include <memory>
#include <utility>

#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "chat_settings.h"
#include "command.h"
#include "conversation.h"
#include "line_editor.h"
#include "output.h"

namespace nibble {

void add_chat_command(CLI::App& app, CommandContext& context);

namespace {

constexpr const char* kHelp =
    "/clear          forget the conversation (so does /reset)\n"
    "/system TEXT    set the system message; without a text, remove it\n"
    "/set NAME VALUE change a setting; without them, show all\n"
    "/save FILE      keep the conversation in a file\n"
    "/load FILE      go on with one\n"
    "/quit           leave (so does /exit, and Ctrl-D)\n"
    "/help           this text\n"
    "A line that ends in \\ goes on in the next; \"\"\" begins and ends several lines.\n"
    "Ctrl-C stops the answer that is being written, or drops the line being typed; pressed again "
    "it leaves.\n";
constexpr const char* kDim = "\x1b[2m";
constexpr const char* kPlain = "\x1b[0m";

struct ChatFlags {
  ModelFlags model;
  AnswerFlags answer;
  RemoteFlags remote;
  std::string system;
  std::string history;
  bool text = false;
};

void say(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

/// What a model wrote, without what would steer the terminal.
std::string harmless(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n' || c == '\t' || (static_cast<unsigned char>(c) >= ' ' && c != '\x7f')) {
      out += c;
    }
  }
  return out;
}

/// Shows a reply as it comes: thoughts dimmed, on a terminal only.
class ReplyView final {
 public:
  explicit ReplyView(bool terminal) : terminal_(terminal) {}

  ChatSinks sinks() {
    return {.on_text = [this](std::string_view text) { show(text, false); },
            .on_reasoning =
                [this](std::string_view text) {
                  if (terminal_) {
                    show(text, true);
                  }
                }};
  }
  /// After the last piece.
  void end() { dim(false); }

 private:
  void show(std::string_view text, bool thought) {
    if (dimmed_ && !thought) {
      dim(false);
      say("\n\n");
    }
    dim(thought);
    say(terminal_ ? harmless(text) : std::string(text));
  }
  void dim(bool wanted) {
    if (terminal_ && dimmed_ != wanted) {
      say(wanted ? kDim : kPlain);
    }
    dimmed_ = wanted;
  }

  bool terminal_;
  bool dimmed_ = false;
};

class ChatSession final {
 public:
  ChatSession(const ChatFlags& flags, ChatPartner& partner, Interrupts& interrupts)
      : settings_(flags.answer),
        partner_(partner),
        interrupts_(interrupts),
        conversation_(partner, flags.system),
        commands_{{"/clear", &ChatSession::clear},   {"/reset", &ChatSession::clear},
                  {"/system", &ChatSession::system}, {"/set", &ChatSession::set},
                  {"/save", &ChatSession::save},     {"/load", &ChatSession::load},
                  {"/help", &ChatSession::help}} {}

  Status run(LineEditor& lines) {
    terminal_ = lines.terminal();
    greet();
    std::string line;
    bool interrupted = false;
    while (true) {
      const LineEditor::Outcome outcome = read_message(lines, line);
      if (outcome == LineEditor::Outcome::kInterrupted && terminal_ && !interrupted) {
        say("\n(Ctrl-C again, Ctrl-D or /quit leaves)\n");
        interrupted = true;
        continue;
      }
      if (outcome != LineEditor::Outcome::kLine) {
        say(terminal_ ? "\n" : "");
        return {};
      }
      if (line == "/quit" || line == "/exit") {
        return {};
      }
      const Status status = obey(line);
      if (!status.ok() && !terminal_) {
        return status;
      }
      if (!status.ok()) {
        say(fmt::format("{}\n", harmless(status.message())));
      }
      interrupted = interrupts_.take() || stopped_;
    }
  }

 private:
  using Command = Status (ChatSession::*)(const std::string& rest);

  void greet() const {
    constexpr std::string_view kContinued =
        "This model has no chat template, or --text was given: what you type is continued as text.";
    if (terminal_) {
      say(fmt::format("{}. /help shows the commands.\n", partner_.title()));
    }
    if (!partner_.chats() && terminal_) {
      say(fmt::format("{}\n", kContinued));
    } else if (!partner_.chats()) {
      NIBBLE_LOG(kWarning, "{}", kContinued);
    }
  }

  // A line, or the several that a message has.
  LineEditor::Outcome read_message(LineEditor& lines, std::string& message) const {
    LineEditor::Outcome outcome = lines.next("> ", message);
    if (!terminal_ || outcome != LineEditor::Outcome::kLine) {
      return outcome;
    }
    const bool block = message.starts_with("\"\"\"");
    if (block) {
      message.erase(0, 3);
    }
    while (block ? !message.ends_with("\"\"\"") : message.ends_with('\\')) {
      if (!block) {
        message.pop_back();
      }
      std::string more;
      outcome = lines.next("... ", more);
      if (outcome != LineEditor::Outcome::kLine) {
        return outcome;
      }
      message += "\n" + more;
    }
    if (block) {
      message.resize(message.size() - 3);
    }
    return outcome;
  }

  // Does what the line says: a command, a turn, or nothing.
  Status obey(const std::string& line) {
    stopped_ = false;
    const bool one_line = line.find('\n') == std::string::npos;
    if (line.starts_with("/") && one_line) {
      const size_t space = line.find(' ');
      const auto found = commands_.find(line.substr(0, space));
      if (found != commands_.end()) {
        const size_t rest =
            space == std::string::npos ? std::string::npos : line.find_first_not_of(' ', space);
        return (this->*found->second)(rest == std::string::npos ? "" : line.substr(rest));
      }
      if (terminal_) {
        say(fmt::format("There is no command {}.\n{}", harmless(line.substr(0, space)), kHelp));
        return {};
      }
    }
    return line.find_first_not_of(" \t\r\n") == std::string::npos ? Status() : answer(line);
  }

  Status answer(const std::string& line) {
    ReplyView view(terminal_);
    auto reply = conversation_.turn(line, settings_, interrupts_, view.sinks());
    view.end();
    if (!reply.ok()) {
      return reply.status();
    }
    stopped_ = reply->finish_reason == "cancelled";
    say(stopped_ ? " [stopped]\n" : "\n");
    tell(*reply);
    return {};
  }

  // What there is to know about a reply, below it.
  void tell(const ChatReply& reply) const {
    if (reply.finish_reason == "length") {
      say("[cut off: max_tokens or the model's context is reached]\n");
    }
    if (reply.cut) {
      say("[the context is full: the beginning of the text was left out; /clear starts again]\n");
    }
    if (conversation_.left_out() > 0) {
      say(
          fmt::format("[the context is full: the first {} turns were left out; /clear starts "
                      "again]\n",
                      conversation_.left_out()));
    }
    if (terminal_ && reply.tokens > 0) {
      const std::string rate =
          reply.seconds > 0 ? fmt::format(", {:.1f} tokens/s",
                                          static_cast<double>(reply.tokens - 1) / reply.seconds)
                            : std::string();
      say(fmt::format("{}[{} tokens{}, the first after {:.2f} s]{}\n", kDim, reply.tokens, rate,
                      reply.ttft_ms / 1000, kPlain));
    }
  }

  Status clear(const std::string& /*rest*/) {
    conversation_.clear();
    return {};
  }
  Status system(const std::string& rest) {
    if (!partner_.chats()) {
      return make_error(StatusCode::kInvalidArgument,
                        "text that is continued has no system message; begin with what you would "
                        "say there");
    }
    conversation_.set_system(rest);
    return {};
  }
  Status set(const std::string& rest) {
    if (rest.empty()) {
      say(answer_flags_text(settings_));
      return {};
    }
    const size_t space = rest.find(' ');
    const std::string value = space == std::string::npos ? "" : rest.substr(space + 1);
    return set_answer_flag(settings_, rest.substr(0, space), value);
  }
  Status save(const std::string& rest) {
    if (rest.empty()) {
      return make_error(StatusCode::kInvalidArgument, "/save needs the name of a file");
    }
    return write_text_file(rest, conversation_.to_json().dump_pretty() + "\n");
  }
  Status load(const std::string& rest) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(rest));
    const auto json = Json::parse(text);
    return (json.ok() ? conversation_.load(*json) : json.status()).with_context(rest);
  }
  Status help(const std::string& /*rest*/) {
    say(kHelp);
    return {};
  }

  AnswerFlags settings_;
  ChatPartner& partner_;
  Interrupts& interrupts_;
  Conversation conversation_;
  std::map<std::string, Command> commands_;
  bool terminal_ = false;
  bool stopped_ = false;  // the last answer, by Ctrl-C
};

Status run(const ChatFlags& flags) {
  if (flags.model.model_dir.empty() == flags.remote.url.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "chat needs a model folder, or the --url of a server, and not both");
  }
  Interrupts interrupts;  // before any thread is started
  const ChatForm form = flags.text ? ChatForm::kText : ChatForm::kAsModel;
  NIBBLE_ASSIGN_OR_RETURN(const auto partner, flags.remote.url.empty()
                                                  ? open_local_partner(flags.model, form)
                                                  : open_remote_partner(flags.remote, form));
  if (interrupts.take()) {
    return make_error(StatusCode::kCancelled, "interrupted while the model was loaded");
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto lines, LineEditor::open(interrupts, flags.history));
  return ChatSession(flags, *partner, interrupts).run(*lines);
}

}  // namespace

void add_chat_command(CLI::App& app, CommandContext& context) {
  constexpr int64_t kMaxTokens = 1024;
  auto flags = std::make_shared<ChatFlags>();
  CLI::App* command = app.add_subcommand("chat", "Talk with a model on the terminal");
  command->add_option("MODEL", flags->model.model_dir,
                      "Model folder in Hugging Face format, unless there is a --url");
  add_run_flags(*command, flags->model);
  command->add_option("--url", flags->remote.url, "Talk to a server: http://127.0.0.1:8000");
  command->add_option("--model", flags->remote.model,
                      "With --url: model to ask for (default: the server's first)");
  command->add_option("--api-key", flags->remote.api_key, "With --url: sent as a bearer token")
      ->envname("OPENAI_API_KEY");
  command->add_option("--system", flags->system, "System message of the conversation");
  command->add_flag("--text", flags->text,
                    "Continue what is typed as text, as models without a chat template do");
  command->add_option("--history", flags->history,
                      "Keep typed lines in this file, for later sessions");
  add_answer_flags(*command, flags->answer, kMaxTokens);
  command->footer(
      "/quit or Ctrl-D leaves, Ctrl-C stops the answer, /clear starts again, /help lists all "
      "commands.\nWithout --temperature and a default in generation_config.json, the temperature "
      "is 0.7.\n\n" +
      app.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
