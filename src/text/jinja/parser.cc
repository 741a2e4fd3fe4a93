#include "text/jinja/parser.h"

#include <algorithm>
#include <initializer_list>

#include "text/jinja/expression_parser.h"
#include "text/jinja/lexer.h"
#include "text/jinja/token_stream.h"

namespace nibble::jinja {
namespace {

using Conditional = ExpressionParser::Conditional;
using StmtPtr = std::unique_ptr<Stmt>;
using Names = std::initializer_list<std::string_view>;

constexpr int kMaxNesting = 100;  // statements inside statements

class StatementParser final {
 public:
  explicit StatementParser(std::vector<Token> tokens)
      : tokens_(std::move(tokens)), expressions_(tokens_) {}

  Result<Block> parse_all();

 private:
  // Statements up to a tag that starts with one of `end`, whose name is the current token then.
  Result<Block> parse_block(Names end);
  Result<StmtPtr> parse_print();
  Result<StmtPtr> parse_statement();
  Result<StmtPtr> parse_if();
  Result<StmtPtr> parse_for();
  Result<StmtPtr> parse_set();
  Result<StmtPtr> parse_macro();
  Result<StmtPtr> parse_call_block();
  Result<StmtPtr> parse_filter_block();
  Result<StmtPtr> parse_with();
  Result<StmtPtr> parse_loop_control();
  Result<StmtPtr> parse_generation();
  Result<std::vector<Parameter>> parse_parameters();
  // The body of a macro or call block, with what it uses of varargs, kwargs and caller.
  Status parse_macro_body(MacroDefinition& macro, std::string_view end);
  Status end_tag() { return tokens_.expect(TokenKind::kBlockEnd, "the end of the tag"); }
  // A body after the tag's end, up to and including {% end %}.
  Result<Block> parse_body(std::string_view end);
  [[nodiscard]] StmtPtr make(StmtKind kind) const {
    auto stmt = std::make_unique<Stmt>();
    stmt->kind = kind;
    stmt->line = tokens_.line();
    return stmt;
  }

  TokenStream tokens_;
  ExpressionParser expressions_;
  int nesting_ = 0;
  int loops_ = 0;  // open for loops in this macro, for break and continue
};

Result<Block> StatementParser::parse_all() {
  NIBBLE_ASSIGN_OR_RETURN(Block block, parse_block({}));
  return block;
}

Result<Block> StatementParser::parse_block(Names end) {
  if (nesting_ >= kMaxNesting) {
    return tokens_.error("tags are nested too deeply");
  }
  ++nesting_;
  Block block;
  while (tokens_.current().kind != TokenKind::kEnd) {
    if (tokens_.current().kind == TokenKind::kText) {
      StmtPtr text = make(StmtKind::kText);
      text->text = tokens_.take().text;
      block.push_back(std::move(text));
      continue;
    }
    if (tokens_.current().kind == TokenKind::kPrintBegin) {
      NIBBLE_ASSIGN_OR_RETURN(StmtPtr print, parse_print());
      block.push_back(std::move(print));
      continue;
    }
    NIBBLE_RETURN_IF_ERROR(tokens_.expect(TokenKind::kBlockBegin, "a tag"));
    if (std::find(end.begin(), end.end(), tokens_.current().text) != end.end()) {
      --nesting_;
      return block;
    }
    NIBBLE_ASSIGN_OR_RETURN(StmtPtr stmt, parse_statement());
    block.push_back(std::move(stmt));
  }
  if (end.size() != 0) {
    return tokens_.unexpected(fmt::format("a tag '{}'", *(end.end() - 1)));
  }
  --nesting_;
  return block;
}

Result<Block> StatementParser::parse_body(std::string_view end) {
  NIBBLE_RETURN_IF_ERROR(end_tag());
  NIBBLE_ASSIGN_OR_RETURN(Block body, parse_block({end}));
  tokens_.take();
  NIBBLE_RETURN_IF_ERROR(end_tag());
  return body;
}

Result<StmtPtr> StatementParser::parse_print() {
  StmtPtr print = make(StmtKind::kPrint);
  tokens_.take();
  NIBBLE_ASSIGN_OR_RETURN(print->value, expressions_.parse_tuple(Conditional::kAllowed, {}));
  NIBBLE_RETURN_IF_ERROR(tokens_.expect(TokenKind::kPrintEnd, "the end of the print tag"));
  return print;
}

Result<StmtPtr> StatementParser::parse_statement() {
  using Rule = Result<StmtPtr> (StatementParser::*)();
  constexpr std::pair<std::string_view, Rule> kRules[] = {
      {"if", &StatementParser::parse_if},
      {"for", &StatementParser::parse_for},
      {"set", &StatementParser::parse_set},
      {"macro", &StatementParser::parse_macro},
      {"call", &StatementParser::parse_call_block},
      {"filter", &StatementParser::parse_filter_block},
      {"with", &StatementParser::parse_with},
      {"break", &StatementParser::parse_loop_control},
      {"continue", &StatementParser::parse_loop_control},
      {"generation", &StatementParser::parse_generation}};
  if (tokens_.current().kind == TokenKind::kName) {
    for (const auto& [name, rule] : kRules) {
      if (tokens_.current().text == name) {
        return (this->*rule)();
      }
    }
    return tokens_.error(fmt::format("unknown or misplaced tag '{}'", tokens_.current().text));
  }
  return tokens_.unexpected("a tag name");
}

Result<StmtPtr> StatementParser::parse_if() {
  StmtPtr stmt = make(StmtKind::kIf);
  tokens_.take();
  while (true) {
    Branch branch;
    NIBBLE_ASSIGN_OR_RETURN(branch.condition,
                            expressions_.parse_tuple(Conditional::kNotAllowed, {}));
    NIBBLE_RETURN_IF_ERROR(end_tag());
    NIBBLE_ASSIGN_OR_RETURN(branch.body, parse_block({"elif", "else", "endif"}));
    stmt->branches.push_back(std::move(branch));
    if (tokens_.take_name("elif")) {
      continue;
    }
    if (tokens_.take_name("else")) {
      Branch otherwise;
      NIBBLE_ASSIGN_OR_RETURN(otherwise.body, parse_body("endif"));
      stmt->branches.push_back(std::move(otherwise));
      return stmt;
    }
    tokens_.take();
    NIBBLE_RETURN_IF_ERROR(end_tag());
    return stmt;
  }
}

Result<StmtPtr> StatementParser::parse_for() {
  StmtPtr stmt = make(StmtKind::kFor);
  tokens_.take();
  NIBBLE_ASSIGN_OR_RETURN(stmt->target, expressions_.parse_target());
  if (stmt->target->kind == ExprKind::kAttribute) {
    return tokens_.error("a for loop cannot assign to an attribute");
  }
  NIBBLE_RETURN_IF_ERROR(tokens_.expect_name("in"));
  NIBBLE_ASSIGN_OR_RETURN(stmt->value,
                          expressions_.parse_tuple(Conditional::kNotAllowed, {"recursive"}));
  if (tokens_.take_name("if")) {
    NIBBLE_ASSIGN_OR_RETURN(stmt->condition, expressions_.parse());
  }
  stmt->is_recursive = tokens_.take_name("recursive");
  NIBBLE_RETURN_IF_ERROR(end_tag());
  ++loops_;
  NIBBLE_ASSIGN_OR_RETURN(stmt->body, parse_block({"else", "endfor"}));
  --loops_;
  if (tokens_.take_name("else")) {
    NIBBLE_ASSIGN_OR_RETURN(stmt->otherwise, parse_body("endfor"));
    return stmt;
  }
  tokens_.take();
  NIBBLE_RETURN_IF_ERROR(end_tag());
  return stmt;
}

Result<StmtPtr> StatementParser::parse_set() {
  StmtPtr stmt = make(StmtKind::kSet);
  tokens_.take();
  NIBBLE_ASSIGN_OR_RETURN(stmt->target, expressions_.parse_target());
  if (tokens_.take_operator("=")) {
    NIBBLE_ASSIGN_OR_RETURN(stmt->value, expressions_.parse_tuple(Conditional::kAllowed, {}));
    NIBBLE_RETURN_IF_ERROR(end_tag());
    return stmt;
  }
  stmt->kind = StmtKind::kSetBlock;
  auto text = std::make_unique<Expr>();
  text->kind = ExprKind::kBlockText;
  text->line = stmt->line;
  NIBBLE_ASSIGN_OR_RETURN(stmt->value, expressions_.parse_filters(std::move(text)));
  NIBBLE_ASSIGN_OR_RETURN(stmt->body, parse_body("endset"));
  return stmt;
}

Result<StmtPtr> StatementParser::parse_filter_block() {
  StmtPtr stmt = make(StmtKind::kFilterBlock);
  tokens_.take();
  auto text = std::make_unique<Expr>();
  text->kind = ExprKind::kBlockText;
  text->line = stmt->line;
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr first, expressions_.parse_filter(std::move(text)));
  NIBBLE_ASSIGN_OR_RETURN(stmt->value, expressions_.parse_filters(std::move(first)));
  NIBBLE_ASSIGN_OR_RETURN(stmt->body, parse_body("endfilter"));
  return stmt;
}

Result<std::vector<Parameter>> StatementParser::parse_parameters() {
  std::vector<Parameter> parameters;
  NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator("("));
  while (!tokens_.take_operator(")")) {
    if (!parameters.empty()) {
      NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator(","));
    }
    Parameter parameter;
    NIBBLE_ASSIGN_OR_RETURN(parameter.name, tokens_.expect_identifier());
    if (tokens_.take_operator("=")) {
      NIBBLE_ASSIGN_OR_RETURN(parameter.fallback, expressions_.parse());
    } else if (!parameters.empty() && parameters.back().fallback != nullptr) {
      return tokens_.error("a parameter without default follows one with a default");
    }
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

Status StatementParser::parse_macro_body(MacroDefinition& macro, std::string_view end) {
  const int outer_loops = std::exchange(loops_, 0);
  const auto outer_names = std::exchange(expressions_.special_names, {});
  NIBBLE_ASSIGN_OR_RETURN(macro.body, parse_body(end));
  macro.uses_varargs = expressions_.special_names.varargs;
  macro.uses_kwargs = expressions_.special_names.kwargs;
  macro.uses_caller = expressions_.special_names.caller;
  expressions_.special_names = outer_names;
  loops_ = outer_loops;
  return {};
}

Result<StmtPtr> StatementParser::parse_macro() {
  StmtPtr stmt = make(StmtKind::kMacro);
  tokens_.take();
  NIBBLE_ASSIGN_OR_RETURN(stmt->macro.name, tokens_.expect_identifier());
  NIBBLE_ASSIGN_OR_RETURN(stmt->macro.parameters, parse_parameters());
  NIBBLE_RETURN_IF_ERROR(parse_macro_body(stmt->macro, "endmacro"));
  return stmt;
}

Result<StmtPtr> StatementParser::parse_call_block() {
  StmtPtr stmt = make(StmtKind::kCallBlock);
  tokens_.take();
  stmt->macro.name = "caller";
  if (tokens_.current().is_operator("(")) {
    NIBBLE_ASSIGN_OR_RETURN(stmt->macro.parameters, parse_parameters());
  }
  NIBBLE_ASSIGN_OR_RETURN(stmt->value, expressions_.parse());
  if (stmt->value->kind != ExprKind::kCall) {
    return tokens_.error("a call block needs a call, such as {% call name() %}");
  }
  NIBBLE_RETURN_IF_ERROR(parse_macro_body(stmt->macro, "endcall"));
  return stmt;
}

Result<StmtPtr> StatementParser::parse_with() {
  StmtPtr stmt = make(StmtKind::kWith);
  tokens_.take();
  while (tokens_.current().kind != TokenKind::kBlockEnd) {
    if (!stmt->branches.empty()) {
      NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator(","));
    }
    Branch binding;
    binding.condition = std::make_unique<Expr>();
    binding.condition->kind = ExprKind::kName;
    NIBBLE_ASSIGN_OR_RETURN(binding.condition->name, tokens_.expect_identifier());
    NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator("="));
    NIBBLE_ASSIGN_OR_RETURN(binding.value, expressions_.parse());
    stmt->branches.push_back(std::move(binding));
  }
  NIBBLE_ASSIGN_OR_RETURN(stmt->body, parse_body("endwith"));
  return stmt;
}

Result<StmtPtr> StatementParser::parse_loop_control() {
  if (loops_ == 0) {
    return tokens_.error(fmt::format("'{}' outside of a for loop", tokens_.current().text));
  }
  StmtPtr stmt = make(tokens_.current().text == "break" ? StmtKind::kBreak : StmtKind::kContinue);
  tokens_.take();
  NIBBLE_RETURN_IF_ERROR(end_tag());
  return stmt;
}

// Marks what the model wrote, for training; the text itself is printed as it is.
Result<StmtPtr> StatementParser::parse_generation() {
  StmtPtr stmt = make(StmtKind::kScope);
  tokens_.take();
  NIBBLE_ASSIGN_OR_RETURN(stmt->body, parse_body("endgeneration"));
  return stmt;
}

}  // namespace

Result<ParsedTemplate> parse_template(std::string_view source) {
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Token> tokens, tokenize(source));
  NIBBLE_ASSIGN_OR_RETURN(Block body, StatementParser(std::move(tokens)).parse_all());
  return ParsedTemplate{std::move(body)};
}

}  // namespace nibble::jinja
