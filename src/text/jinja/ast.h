#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace nibble::jinja {

enum class Operator {
  kNone,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kPower,
  kNegate,
  kPlus,
  kNot,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn,
};

enum class ExprKind {
  kConstant,     // constant
  kName,         // name
  kList,         // children: items
  kTuple,        // children: items
  kDict,         // children: key, value, key, value, ...
  kAttribute,    // children: object; name
  kItem,         // children: object, index
  kSlice,        // children: object, first, last, step (absent ones null)
  kCall,         // children: callee; arguments
  kFilter,       // children: subject; name; arguments
  kTest,         // children: subject; name; arguments
  kUnary,        // children: operand; operators[0]
  kBinary,       // children: left, right; operators[0]
  kCompare,      // children: first, second, ...; operators between them
  kConcat,       // children: parts
  kAnd,          // children: left, right
  kOr,           // children: left, right
  kConditional,  // children: condition, then, else (else may be null)
  kBlockText,    // rendered body of the filter or set block around it
};

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Argument {
  enum class Kind { kPositional, kNamed, kSpread, kSpreadNamed };
  Kind kind = Kind::kPositional;
  std::string name;
  ExprPtr value;
};

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  int line = 1;
  int depth = 1;  // of the tree below, itself included
  std::string name;
  Value constant;
  std::vector<Operator> operators;
  std::vector<ExprPtr> children;
  std::vector<Argument> arguments;
};

struct Stmt;
using Block = std::vector<std::unique_ptr<Stmt>>;

struct Parameter {
  std::string name;
  ExprPtr fallback;  // null: none
};

/// A macro, or the body that a call block hands over as caller().
struct MacroDefinition {
  std::string name;
  std::vector<Parameter> parameters;
  Block body;
  bool uses_varargs = false;
  bool uses_kwargs = false;
  bool uses_caller = false;
};

enum class StmtKind {
  kText,         // text
  kPrint,        // value
  kIf,           // branches
  kFor,          // target, value, condition, body, otherwise, is_recursive
  kSet,          // target, value
  kSetBlock,     // target, body, value (filters over kBlockText)
  kMacro,        // macro
  kCallBlock,    // value (a call), macro (the caller)
  kFilterBlock,  // body, value (filters over kBlockText)
  kWith,         // branches hold targets and values; body
  kScope,        // body
  kBreak,
  kContinue,
};

struct Branch {
  ExprPtr condition;  // null: else. In a with statement: the target
  ExprPtr value;      // only in a with statement
  Block body;
};

struct Stmt {
  StmtKind kind = StmtKind::kText;
  int line = 1;
  std::string text;
  ExprPtr target;
  ExprPtr value;
  ExprPtr condition;
  bool is_recursive = false;
  std::vector<Branch> branches;
  Block body;
  Block otherwise;
  MacroDefinition macro;
};

}  // namespace nibble::jinja
