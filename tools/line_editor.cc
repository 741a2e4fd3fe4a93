#include "line_editor.h"

#include <algorithm>
#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cwchar>
#include <string_view>
#include <utility>
#include <vector>

#include <histedit.h>
#include <poll.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include "base/utf8.h"

namespace nibble {
namespace {

constexpr std::string_view kPasteBegin = "\x1b[200~";
constexpr std::string_view kPasteEnd = "\x1b[201~";
constexpr size_t kShownPaste = 400;  // bytes of a paste that the line shows itself
constexpr int kHistoryLines = 1000;

/// Reads what is there, and says so: kLine when something came.
LineEditor::Outcome read_more(Interrupts& interrupts, std::string& buffer) {
  pollfd fds[] = {{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0},
                  {.fd = interrupts.fd(), .events = POLLIN, .revents = 0}};
  while (poll(fds, 2, -1) < 0) {
    if (errno != EINTR) {
      return LineEditor::Outcome::kEnd;
    }
  }
  if (interrupts.take()) {
    buffer.clear();
    return LineEditor::Outcome::kInterrupted;
  }
  char block[65536];
  const ssize_t count = read(STDIN_FILENO, block, sizeof block);
  if (count <= 0) {
    return LineEditor::Outcome::kEnd;
  }
  buffer.append(block, static_cast<size_t>(count));
  return LineEditor::Outcome::kLine;
}

/// Lines of a file or a pipe.
class PlainLines final : public LineEditor {
 public:
  explicit PlainLines(Interrupts& interrupts) : interrupts_(interrupts) {}

  Outcome next(const std::string& /*prompt*/, std::string& line) override {
    while (true) {
      if (const size_t end = buffer_.find('\n', searched_); end != std::string::npos) {
        line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        searched_ = 0;
        return Outcome::kLine;
      }
      searched_ = buffer_.size();
      const Outcome outcome = read_more(interrupts_, buffer_);
      if (outcome == Outcome::kEnd && !buffer_.empty()) {
        line = std::exchange(buffer_, "");
        searched_ = 0;
        return Outcome::kLine;
      }
      if (outcome != Outcome::kLine) {
        searched_ = 0;
        return outcome;
      }
    }
  }
  [[nodiscard]] bool terminal() const override { return false; }

 private:
  Interrupts& interrupts_;
  std::string buffer_;
  size_t searched_ = 0;  // there is no line end before
};

/// A terminal that gives bytes as they are typed and shows none by itself. In its own mode it
/// would cut a line at 4095 bytes, which are also typed while an answer is being written.
class TerminalMode final {
 public:
  TerminalMode() {
    tcgetattr(STDIN_FILENO, &before_);
    termios mode = before_;
    mode.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    mode.c_cc[VMIN] = 1;
    mode.c_cc[VTIME] = 0;
    raw_ = mode;
    apply();
  }
  TerminalMode(const TerminalMode&) = delete;
  TerminalMode& operator=(const TerminalMode&) = delete;
  ~TerminalMode() { tcsetattr(STDIN_FILENO, TCSADRAIN, &before_); }
  void apply() const { tcsetattr(STDIN_FILENO, TCSADRAIN, &raw_); }

 private:
  termios before_{};
  termios raw_{};
};

/// What is typed and pasted, as libedit shall see it.
class TypedText final {
 public:
  explicit TypedText(Interrupts& interrupts) : interrupts_(interrupts) {}

  /// The next character; 0 at the end and when Ctrl-C was pressed.
  int next(wchar_t* out) {
    while (true) {
      if (at_ < shown_.size()) {
        *out = next_character();
        return 1;
      }
      shown_.clear();
      at_ = 0;
      take_bytes();
      if (!shown_.empty()) {
        continue;
      }
      const LineEditor::Outcome outcome = read_more(interrupts_, bytes_);
      if (outcome != LineEditor::Outcome::kLine) {
        interrupted_ = outcome == LineEditor::Outcome::kInterrupted;
        return 0;
      }
    }
  }
  bool take_interrupt() { return std::exchange(interrupted_, false); }
  /// A new line begins: pastes of the last one are forgotten.
  void begin() { pastes_.clear(); }
  /// The line with its pastes in place of their marks.
  [[nodiscard]] std::string expand(std::string line) const {
    for (size_t i = 0; i < pastes_.size(); ++i) {
      const std::string mark = mark_of(i);
      if (const size_t at = line.find(mark); at != std::string::npos) {
        line.replace(at, mark.size(), pastes_[i]);
      }
    }
    return line;
  }

 private:
  wchar_t next_character() {
    const size_t length = std::max<size_t>(utf8_length(shown_, at_), 1);
    wchar_t out = L'?';
    std::mbstate_t state{};
    if (std::mbrtowc(&out, shown_.data() + at_, length, &state) > length) {
      out = L'?';
    }
    at_ += length;
    return out;
  }
  // Moves to shown_ what is complete of the bytes: characters, and pastes.
  void take_bytes() {
    if (bytes_.starts_with(kPasteBegin)) {
      const size_t end = bytes_.find(kPasteEnd, searched_);
      if (end == std::string::npos) {
        searched_ =
            std::max(kPasteBegin.size(), bytes_.size() - std::min(bytes_.size(), kPasteEnd.size()));
        return;
      }
      take_paste(bytes_.substr(kPasteBegin.size(), end - kPasteBegin.size()));
      bytes_.erase(0, end + kPasteEnd.size());
      searched_ = 0;
      return;
    }
    size_t end = bytes_.find(kPasteBegin, 1);
    end = std::min(end, bytes_.size());
    end -= unfinished(std::string_view(bytes_).substr(0, end));
    shown_ = bytes_.substr(0, end);
    bytes_.erase(0, end);
  }
  // Bytes at the end that begin a character or the mark of a paste. A lone escape is a key.
  static size_t unfinished(std::string_view text) {
    for (size_t length = std::min(text.size(), kPasteBegin.size() - 1); length > 1; --length) {
      if (kPasteBegin.starts_with(text.substr(text.size() - length))) {
        return length;
      }
    }
    for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
      const auto byte = static_cast<unsigned char>(text[text.size() - back]);
      if ((byte & 0xC0) == 0x80) {
        continue;
      }
      const size_t wanted = 1 + static_cast<size_t>(byte >= 0xC0) +
                            static_cast<size_t>(byte >= 0xE0) + static_cast<size_t>(byte >= 0xF0);
      return wanted > back ? back : 0;
    }
    return 0;
  }
  void take_paste(std::string_view text) {
    std::string clean;
    bool lines = false;
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if (c == '\r') {
        clean += i + 1 < text.size() && text[i + 1] == '\n' ? "" : "\n";
      } else if (c == '\t' || c == '\n' || static_cast<unsigned char>(c) >= ' ') {
        clean += c;
      }
      lines = lines || c == '\r' || c == '\n' || c == '\t';
    }
    if (!lines && clean.size() <= kShownPaste) {
      shown_ = clean;
      return;
    }
    pastes_.push_back(std::move(clean));
    shown_ = mark_of(pastes_.size() - 1);
  }
  [[nodiscard]] std::string mark_of(size_t i) const {
    return fmt::format("[paste {}: {} bytes]", i + 1, pastes_[i].size());
  }

  Interrupts& interrupts_;
  std::string bytes_;  // as read
  size_t searched_ = 0;
  std::string shown_;  // UTF-8, for libedit
  size_t at_ = 0;
  std::vector<std::string> pastes_;
  bool interrupted_ = false;
};

class EditedLines final : public LineEditor {
 public:
  explicit EditedLines(Interrupts& interrupts) : typed_(interrupts) {
    std::setlocale(LC_CTYPE, "C.UTF-8");
    history_ = history_init();
    HistEvent event{};
    history(history_, &event, H_SETSIZE, kHistoryLines);
    history(history_, &event, H_SETUNIQUE, 1);
    editor_ = el_init("nibble", stdin, stdout, stderr);
    el_set(editor_, EL_CLIENTDATA, this);
    el_set(editor_, EL_PROMPT, &prompt_of);
    el_set(editor_, EL_EDITOR, "emacs");
    el_set(editor_, EL_SIGNAL, 1);
    el_set(editor_, EL_HIST, ::history, history_);
    el_set(editor_, EL_GETCFN, &next_character);
    el_set(editor_, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    const char* name = nullptr;
    el_get(editor_, EL_TERMINAL, &name);
    pastes_ = name != nullptr && std::string_view(name) != "dumb";
    mode_.apply();
  }
  ~EditedLines() override {
    if (!file_.empty()) {
      const mode_t before = umask(0077);  // what people type is theirs
      HistEvent event{};
      history(history_, &event, H_SAVE, file_.c_str());
      umask(before);
    }
    el_end(editor_);
    history_end(history_);
  }

  Status load(const std::string& file) {
    HistEvent event{};
    if (access(file.c_str(), F_OK) == 0 && history(history_, &event, H_LOAD, file.c_str()) < 0) {
      return make_error(StatusCode::kCorrupt,
                        "--history {}: is no history of this program; name another file", file);
    }
    file_ = file;
    return {};
  }

  Outcome next(const std::string& prompt, std::string& line) override {
    prompt_ = prompt;
    typed_.begin();
    set_pastes("h");
    int count = 0;
    const char* text = el_gets(editor_, &count);
    set_pastes("l");
    mode_.apply();
    if (text == nullptr || count <= 0) {
      return typed_.take_interrupt() ? Outcome::kInterrupted : Outcome::kEnd;
    }
    std::string_view typed(text, static_cast<size_t>(count));
    if (typed.ends_with('\n')) {
      typed.remove_suffix(1);
    }
    line = typed_.expand(std::string(typed));
    if (typed.find_first_not_of(' ') != std::string_view::npos) {
      HistEvent event{};
      history(history_, &event, H_ENTER, std::string(typed).c_str());
    }
    return Outcome::kLine;
  }
  [[nodiscard]] bool terminal() const override { return true; }

 private:
  static EditedLines& self(EditLine* editor) {
    void* data = nullptr;
    el_get(editor, EL_CLIENTDATA, &data);
    return *static_cast<EditedLines*>(data);
  }
  static char* prompt_of(EditLine* editor) { return self(editor).prompt_.data(); }
  static int next_character(EditLine* editor, wchar_t* out) {
    return self(editor).typed_.next(out);
  }
  // Asks the terminal to mark pastes, or to stop that.
  void set_pastes(const char* how) const {
    if (pastes_) {
      std::fprintf(stdout, "\x1b[?2004%s", how);
      std::fflush(stdout);
    }
  }

  TerminalMode mode_;
  TypedText typed_;
  History* history_ = nullptr;
  EditLine* editor_ = nullptr;
  std::string prompt_;
  std::string file_;
  bool pastes_ = false;
};

}  // namespace

Result<std::unique_ptr<LineEditor>> LineEditor::open(Interrupts& interrupts,
                                                     const std::string& history) {
  if (isatty(STDIN_FILENO) != 1) {
    return std::unique_ptr<LineEditor>(std::make_unique<PlainLines>(interrupts));
  }
  auto editor = std::make_unique<EditedLines>(interrupts);
  if (!history.empty()) {
    NIBBLE_RETURN_IF_ERROR(editor->load(history));
  }
  return std::unique_ptr<LineEditor>(std::move(editor));
}

}  // namespace nibble
