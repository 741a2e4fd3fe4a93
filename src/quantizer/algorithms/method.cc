#include "quantizer/algorithms/method.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace nibble {
namespace {

constexpr std::array<std::pair<std::string_view, Transform>, 5> kTransforms = {
    {{"rotate", Transform::kRotate},
     {"smooth", Transform::kSmooth},
     {"awq", Transform::kAwq},
     {"permute", Transform::kPermute},
     {"turn", Transform::kTurn}}};

std::optional<Transform> find_transform(std::string_view name) {
  for (const auto& [text, transform] : kTransforms) {
    if (text == name) {
      return transform;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string_view transform_name(Transform transform) {
  for (const auto& [text, value] : kTransforms) {
    if (value == transform) {
      return text;
    }
  }
  return {};
}

bool Method::needs_text() const {
  return rounding != Rounding::kRtn ||
         std::ranges::any_of(transforms, [](Transform each) { return nibble::needs_text(each); });
}

Result<Method> parse_method(std::string_view text) {
  Method method;
  bool rounded = false;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view name = text.substr(begin, end - begin);
    begin = end + 1;
    if (rounded) {
      return make_error(StatusCode::kInvalidArgument,
                        "method \"{}\": \"{}\" comes after a rounding, which ends a chain", text,
                        name);
    }
    const std::optional<Transform> transform = find_transform(name);
    if (transform && std::ranges::find(method.transforms, *transform) != method.transforms.end()) {
      return make_error(StatusCode::kInvalidArgument, "method \"{}\": \"{}\" is in it twice", text,
                        name);
    }
    if (transform) {
      method.transforms.push_back(*transform);
      continue;
    }
    const auto rounding = parse_rounding(name);
    if (!rounding.ok()) {
      return make_error(StatusCode::kInvalidArgument,
                        "method \"{}\": {}, or, before one of these, rotate, smooth, awq, permute",
                        text, rounding.status().message());
    }
    method.rounding = *rounding;
    rounded = true;
  }
  return method;
}

std::string method_name(const Method& method) {
  std::string text;
  for (const Transform transform : method.transforms) {
    text += transform_name(transform);
    text += ',';
  }
  return text + std::string(rounding_name(method.rounding));
}

}  // namespace nibble
