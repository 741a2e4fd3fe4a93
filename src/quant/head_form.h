#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace nibble {

/// What is done to the heads of keys, or of values, before they are coded.
struct HeadForm {
  bool centred = false;  // each channel's mean is taken off
  bool turned = false;   // then hadamard() turns it

  constexpr bool operator==(const HeadForm&) const = default;
};

/// All of them: by index, bit 0 is `centred` and bit 1 is `turned`.
inline constexpr std::array kHeadForms = {HeadForm{}, HeadForm{.centred = true},
                                          HeadForm{.turned = true},
                                          HeadForm{.centred = true, .turned = true}};

[[nodiscard]] constexpr size_t head_form_index(HeadForm form) {
  return (form.centred ? 1U : 0U) + (form.turned ? 2U : 0U);
}

/// "plain", "centred", "turned", "centred+turned".
[[nodiscard]] std::string_view head_form_name(HeadForm form);
/// The form of this name, or none.
[[nodiscard]] std::optional<HeadForm> find_head_form(std::string_view name);

}  // namespace nibble
