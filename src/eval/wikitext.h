#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nibble {

/// The articles of a WikiText file, each from its title on (" = Title = ", in a line of its own
/// with one pair of equal signs); what stands before the first belongs to it. A text without
/// titles is one page. Views into `text`; pages of white space alone are left out.
[[nodiscard]] std::vector<std::string_view> wikitext_pages(std::string_view text);

/// A page as it was before WikiText put spaces around its punctuation: the rules of lm-eval's task
/// `wikitext`, in their order.
[[nodiscard]] std::string detokenized_wikitext(std::string_view page);

/// Parts between white space. As lm-eval counts, white space at either end adds an empty part.
[[nodiscard]] int64_t words_of(std::string_view page);

}  // namespace nibble
