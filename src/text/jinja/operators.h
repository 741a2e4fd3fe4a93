#pragma once

#include <vector>

#include "base/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace nibble::jinja {

/// Python's ==, also of containers.
Result<bool> equal(const Value& left, const Value& right, Runtime& runtime);
/// Python's < for numbers, strings, lists and tuples. Errors: kInvalidArgument for other pairs.
Result<bool> less(const Value& left, const Value& right, Runtime& runtime);
/// Any of == != < <= > >= in, not in.
Result<bool> compare(Operator op, const Value& left, const Value& right, Runtime& runtime);
/// Python's `item in container`.
Result<bool> contains(const Value& container, const Value& item, Runtime& runtime);

/// + - * / // % **. Errors: kInvalidArgument for types that do not fit, division by zero and
/// integers beyond 128 bits.
Result<Value> apply_binary(Operator op, const Value& left, const Value& right, Runtime& runtime);
/// Unary -, + and not.
Result<Value> apply_unary(Operator op, const Value& operand);

/// What a for loop visits: items, keys of a dict, characters of a string; nothing for undefined.
Result<std::vector<Value>> iterate(const Value& value, Runtime& runtime);
/// Python's len(). Errors: kInvalidArgument for values without length.
Result<int64_t> length(const Value& value);

/// object[index]: the item, else the attribute of that name, else undefined.
Result<Value> get_item(const Value& object, const Value& index, Runtime& runtime);
/// object.name: a method, else the item of that name, else undefined.
Result<Value> get_attribute(const Value& object, const std::string& name, Runtime& runtime);
/// object[first:last:step]; undefined and none bounds are absent.
struct SliceBounds {
  Value first;
  Value last;
  Value step;
};
Result<Value> get_slice(const Value& object, const SliceBounds& bounds, Runtime& runtime);

}  // namespace nibble::jinja
