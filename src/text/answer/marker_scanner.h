#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nibble {

/// Finds markers ("<tool_call>") in a text that arrives in pieces, whether the model wrote them as
/// special tokens or letter by letter. What it reports does not depend on how the text is cut.
class MarkerScanner final {
 public:
  enum class Written : uint8_t { kAsText, kAsToken };

  class Sink {
   public:
    virtual ~Sink() = default;
    virtual void on_text(std::string_view text) = 0;
    virtual void on_marker(std::string_view marker, Written written) = 0;
    /// A special token that is no marker.
    virtual void on_token(std::string_view token) = 0;
  };

  /// None of the markers is empty or begins another one. The sink outlives this.
  MarkerScanner(std::vector<std::string> markers, Sink& sink);

  void text(std::string_view text);
  void special(std::string_view token);
  /// What was held back is text.
  void finish();

 private:
  /// Where held_ has a marker or the beginning of one, from a place on.
  [[nodiscard]] size_t find_candidate(size_t from) const;

  std::vector<std::string> markers_;
  std::string first_bytes_;
  Sink& sink_;
  std::string held_;  // begins a marker, maybe
};

}  // namespace nibble
