#include "quant/kv_formats.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace nibble {
namespace {

constexpr std::array<std::string_view, kHeadForms.size()> kHeadFormNames = {
    "plain", "centred", "turned", "centred+turned"};

}  // namespace

std::string_view head_form_name(HeadForm form) { return kHeadFormNames.at(head_form_index(form)); }

std::optional<HeadForm> find_head_form(std::string_view name) {
  for (const HeadForm form : kHeadForms) {
    if (head_form_name(form) == name) {
      return form;
    }
  }
  return std::nullopt;
}

std::string latent_code_names() {
  std::vector<KvCode> codes;
  std::ranges::copy_if(kKvCodes, std::back_inserter(codes),
                       [](KvCode code) { return kv_format(code).latent.kept; });
  return kv_code_names(codes);
}

std::string kv_code_names(std::span<const KvCode> codes) {
  std::string names;
  for (const KvCode code : codes) {
    names += names.empty() ? "" : ", ";
    names += kv_code_name(code);
  }
  return names;
}

}  // namespace nibble
