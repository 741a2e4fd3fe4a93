"""Keeps docs/architecture.md true: checks the tree against the rules of the house.

Usage: check.py [--build BUILD_DIR]. Errors are printed as "path:line: rule: message" and make the
exit status 1; warnings do not. With a build folder, the flags named in the documentation are
compared with `nibble --help`, and the ISA objects are searched for weak symbols. Standard library
only; runs in seconds.
"""

import argparse
import collections
import glob
import pathlib
import re
import subprocess
import sys

import functions

LEVELS = {
    "base": 0, "core": 1, "net": 1, "quant": 2, "gguf": 2, "arch": 3, "ops": 3, "checkpoint": 4, "backend": 4,
    "layers": 5, "kvcache": 5, "text": 5, "model": 6, "quantizer": 6, "engine": 7, "synthetic": 7, "calibration": 8,
    "train": 7, "server": 8, "eval": 8, "tools": 9,
    "bench": 10,
}
HEADER_TARGET, SOURCE_TARGET, LONG_TARGET, HARD_STOP = 150, 400, 600, 800
FUNCTION_TARGET, FUNCTION_STOP, MOST_PARAMETERS = 60, 150, 4
# Headers whose content is kernels, measured as the sources that they are.
KERNEL_HEADERS = ("src/backend/cpu/amx/", "src/backend/cpu/kernels/", "src/backend/cpu/simd/",
                  "src/quantizer/kernels/")
# Headers that nobody outside their folder includes.
INNER_HEADERS = ("src/backend/cuda/kernels/",)

# Each third-party header belongs to the files below one prefix.
THIRD_PARTY = [
    (r"boost/json", ("src/base/json_parse.cc",)),
    (r"boost/(asio|beast|system)", ("src/net/", "src/server/")),
    (r"spdlog/", ("src/base/log.cc",)),
    (r"CLI/", ("tools/", "bench/")),
    (r"histedit", ("tools/line_editor.cc",)),
    (r"pcre2", ("src/text/", "src/checkpoint/quant_config.cc")),
    (r"utf8proc", ("src/text/",)),
    (r"xxhash", ("src/quantizer/digest.cc", "src/checkpoint/weights_digest.cc")),
    (r"(xgrammar|dlpack|picojson)", ("src/text/grammar/grammar.cc",)),
    (r"(cuda|cublas|nccl)", ("src/backend/cuda/", "bench/cuda/")),
    (r"(immintrin|x86intrin|arm_neon)\.h", ("src/backend/cpu/", "bench/ceilings/")),
]
TRY_ALLOWED = ("src/base/json", "src/engine/engine.cc", "src/text/grammar/grammar.cc", "src/server/http_connection.cc", "tools/main.cc")
MAX_TRY_IN_SERVER = 2  # around the handler, and around what the handler posted for later
SCHEME_TABLE = "src/quant/schemes.cc"
# Words of the scheme table that are also element types or KV formats and so appear elsewhere.
SHARED_WORDS = {"bf16", "int8", "int4"}
# Schemes whose name is a quant_method of config.json, too: readers of checkpoints spell it.
QUANT_METHODS, METHOD_READERS = {"mxfp4"}, "src/checkpoint/"
FAMILIES = "src/arch/families/"
SPLIT_NAMES = "src/text/"  # pre-tokenizers are named after the families that had them first
ARCHITECTURE_CLASS = r"\b[A-Z]\w*For(?:CausalLM|ConditionalGeneration)\b"
ROUTE_TABLE = "src/server/app.cc"
GEMM_REGISTRY = "src/backend/cuda/registry.cc"
# Names in PascalCase that pages give as examples or take from other programs.
FOREIGN_TYPES = {"PascalCase"}

# Written in pieces, so that this file does not contain what it looks for.
MACHINE_PATHS = re.compile(
    r"(?<![\w.\-/])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "tm" + "p", "ho" + "me"]) + r")(?=/)")
REGISTRY_HOSTS = re.compile("|".join(
    [r"deb\." + r"debian\.org", r"py" + r"pi\.org", r"python" + r"hosted\.org",
     r"conda\." + r"anaconda\.org", r"snapshot\." + r"debian\.org"]))
UNFINISHED = re.compile(
    r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b|"
    + r"(?i:\bnot (?:yet )?implem" + r"ented\b|\bcoming so" + r"on\b|\bplace" + r"holder\b"
    + r"|\bunimplem" + r"ented\b)")
# Flags of other programs that the documentation mentions.
FOREIGN_FLAGS = {"--preset", "--build", "--target", "--output-on-failure", "--gtest_filter",
                 "--version", "--help", "--dry-run",
                 # Slurm and GNU parallel
                 "--array", "--cpus-per-task", "--mem", "--requeue", "--parsable", "--dependency",
                 "--wrap", "--sshloginfile", "--retries"}
TOP_FOLDERS = ("src", "tools", "tests", "docs", "scripts", "cmake", "models", "bench", ".ci")
PROSE_DATA = ("tests/data/", "tests/golden/", "models/", "tests/fuzz/corpus/")


class Report:
    """Collects findings; `errors` decide the exit status."""

    def __init__(self):
        self.errors, self.warnings = [], []

    def error(self, path, line, rule, message):
        self.errors.append(f"{path}:{line}: {rule}: {message}")

    def warn(self, path, line, rule, message):
        self.warnings.append(f"{path}:{line}: warning: {rule}: {message}")


def strip_comments(text):
    """Blanks // and /* */ comments, keeping line numbers and string literals."""
    pattern = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)

    def keep(match):
        found = match.group(0)
        return re.sub(r"[^\n]", " ", found) if found.startswith("/") else found

    return pattern.sub(keep, text)


def strip_strings(code):
    """Blanks string literals of code without comments, keeping #include lines."""
    lines = [line if line.lstrip().startswith("#include") else
             re.sub(r'"(?:\\.|[^"\\])*"', '""', line) for line in code.split("\n")]
    return "\n".join(lines)


def folder_of(path):
    """The house folder of a source file: "base", ..., "tools", "bench", or None outside the house."""
    parts = path.split("/")
    if parts[0] in ("tools", "bench"):
        return parts[0]
    return parts[1] if parts[0] == "src" and len(parts) > 2 else None


def is_test(path):
    return "_test_" in path or path.endswith("_test.cc") or "/testing/" in path or path.startswith("tests/")


def literals(code):
    """Yields (line number, text) of each string literal of code without comments."""
    for match in re.finditer(r'R"(\w*)\((.*?)\)\1"|"((?:\\.|[^"\\\n])*)"', code, re.DOTALL):
        if not code[code.rfind("\n", 0, match.start()) + 1:].lstrip().startswith("#include"):
            yield code.count("\n", 0, match.start()) + 1, match.group(2) or match.group(3) or ""


def matches(code, pattern):
    """Yields (line number, match) of a pattern in each line."""
    for number, line in enumerate(code.split("\n"), 1):
        for match in re.finditer(pattern, line):
            yield number, match


class Tree:
    """The tracked and not ignored files below a root, as {relative path: text}."""

    def __init__(self, root, files=None):
        self.root = pathlib.Path(root)
        self.names = files if files is not None else self._list()
        self.text = {}
        for name in self.names:
            try:
                self.text[name] = (self.root / name).read_text(encoding="utf-8")
            except (UnicodeDecodeError, IsADirectoryError, FileNotFoundError):
                pass
        self.sources = [name for name in self.text
                        if name.endswith((".cc", ".h", ".cu", ".cuh"))
                        and not name.startswith(PROSE_DATA)]
        self.code = {name: strip_comments(self.text[name]) for name in self.sources}
        self.docs = [name for name in self.text if name.endswith(".md")
                     and (name.startswith("docs/") or "/" not in name)]

    def _list(self):
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=self.root, capture_output=True, text=True)
        if listing.returncode == 0:
            return sorted(set(listing.stdout.split("\n")) - {""})
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*")
                      if path.is_file() and not str(path.relative_to(self.root)).startswith(
                          ("build", ".git/", ".venv")))


def check_includes(tree, report):
    for path in tree.sources:
        folder = folder_of(path)
        if folder is None:
            continue
        if folder not in LEVELS:
            report.error(path, 1, "levels", f"folder {folder} has no level; add it to "
                         "docs/architecture.md and to LEVELS")
            continue
        for line, match in matches(tree.code[path], r'^\s*#include "([^"]+)"'):
            target = match.group(1)
            if target.startswith("."):
                report.error(path, line, "includes", f'relative include "{target}"')
            other = target.split("/")[0] if "/" in target else folder
            if other == folder or other not in LEVELS:
                continue
            if LEVELS[other] > LEVELS[folder]:
                report.error(path, line, "includes", f"{folder} includes upwards: {target}")
            elif LEVELS[other] == LEVELS[folder]:
                report.error(path, line, "includes", f"{folder} includes sideways: {target}")


def check_third_party(tree, report):
    for path in tree.sources:
        for line, match in matches(tree.code[path], r'^\s*#include [<"]([^>"]+)[>"]'):
            for pattern, allowed in THIRD_PARTY:
                if re.match(pattern, match.group(1)) and not path.startswith(allowed) \
                        and not is_test(path):
                    report.error(path, line, "third-party",
                                 f"{match.group(1)} belongs to {', '.join(allowed)} only")


def length_target(path):
    """What a file should keep to: device code and lists of test cases may be longer."""
    if path.endswith((".cu", ".cuh", "_test.cc")):
        return LONG_TARGET
    if path.endswith(".h") and not path.startswith(KERNEL_HEADERS) and not is_test(path):
        return HEADER_TARGET
    return SOURCE_TARGET


def check_lengths(tree, report):
    for path in tree.sources:
        if path.endswith(("_table.cc", "_tables.cc", "_table.h", "_tables.h")):
            continue
        length, target = tree.text[path].count("\n"), length_target(path)
        if length > HARD_STOP:
            report.error(path, length, "length", f"{length} lines, hard stop {HARD_STOP}")
        elif length > target:
            report.warn(path, length, "length", f"{length} lines, target {target}")


def is_interface(path):
    """Whether others call what this header declares."""
    return path.startswith("src/") and path.endswith(".h") and not is_test(path) \
        and not path.startswith(KERNEL_HEADERS + INNER_HEADERS)


def flags_among(parameters):
    """Parameters of type bool, but for those that are a value themselves: Json(bool value)."""
    found = [text for text in parameters if re.match(r"(?:const )?bool\b(?!\s*[*&])", text)]
    return [text for text in found if not re.match(r"(?:const )?bool (?:value|fallback)\b", text)]


def check_functions(tree, report):
    """Lengths of all functions (tests may list cases), and what those in headers take."""
    for path in tree.sources:
        for function in functions.functions(tree.code[path]):
            if function.body_lines > FUNCTION_STOP:
                report.error(path, function.line, "function",
                             f"{function.name}() has {function.body_lines} lines, hard stop "
                             f"{FUNCTION_STOP}")
            elif function.body_lines > FUNCTION_TARGET and not is_test(path):
                report.warn(path, function.line, "function",
                            f"{function.name}() has {function.body_lines} lines, target "
                            f"{FUNCTION_TARGET}")
            if not is_interface(path) or not function.public:
                continue
            if len(function.parameters) > MOST_PARAMETERS:
                report.warn(path, function.line, "parameters",
                            f"{function.name}() takes {len(function.parameters)}; more than "
                            f"{MOST_PARAMETERS} make a struct")
            for flag in flags_among(function.parameters):
                report.warn(path, function.line, "parameters",
                            f"{function.name}() takes {flag}; an enum says what it means")


def check_pragma_once(tree, report):
    for path in tree.sources:
        if path.endswith((".h", ".cuh")) and "#pragma once" not in tree.code[path]:
            report.error(path, 1, "header", "#pragma once is missing")


def check_calls(tree, report):
    """getenv, try, abort and exit only where the house allows them."""
    tries_in_server = []
    for path in tree.sources:
        if is_test(path):
            continue
        code = strip_strings(tree.code[path])
        for line, _ in matches(code, r"\bgetenv\s*\("):
            report.error(path, line, "getenv", "behaviour comes from flags, not the environment")
        for line, _ in matches(code, r"\btry\s*\{"):
            if not path.startswith(TRY_ALLOWED):
                report.error(path, line, "try", f"only in {', '.join(TRY_ALLOWED)}")
            if path.startswith("src/server/"):
                tries_in_server.append((path, line))
        if path.startswith("src/"):
            for line, _ in matches(code, r"(?<![\w.>:])(?:std::)?(?:abort|exit|_exit|quick_exit)\s*\("):
                report.error(path, line, "exit", "return a Status or use CHECK")
    for path, line in tries_in_server[MAX_TRY_IN_SERVER:]:
        report.error(path, line, "try", "only the two route wrappers; return a Status")


def scheme_names(tree):
    text = tree.text.get(SCHEME_TABLE, "")
    return set(re.findall(r'QuantScheme\{"([^"]+)"', text)) - SHARED_WORDS


def check_scheme_literals(tree, report):
    """Names of schemes in literals, as a whole or as a word of a message."""
    names = scheme_names(tree)
    if not names:
        report.error(SCHEME_TABLE, 1, "schemes", "no scheme found; adapt scheme_names()")
        return
    pattern = re.compile(r"\b(?:" + "|".join(sorted(names, key=len, reverse=True)) + r")\b")
    for path in tree.sources:
        if path == SCHEME_TABLE or "/dialects/" in path or is_test(path):
            continue
        for line, text in literals(tree.code[path]):
            for name in pattern.findall(text):
                if name in QUANT_METHODS and path.startswith(METHOD_READERS):
                    continue
                report.error(path, line, "schemes", f'"{name}" is spelled only in {SCHEME_TABLE}; '
                             "ask the table")


def family_names(tree):
    """Values of model_type that the families give, once there is a folder of them."""
    found = set()
    for path in tree.sources:
        if path.startswith(FAMILIES) and not is_test(path):
            for value in re.findall(r"\bmodel_types?\b[^;{}\"]*\{?((?:\s*\"\w+\"\s*,?)+)",
                                    tree.code[path]):
                found |= set(re.findall(r"\w+", value))
    return found


def check_family_literals(tree, report):
    """Names of model families stay in one folder. Without that folder there is nothing to check."""
    if not any(path.startswith(FAMILIES) for path in tree.sources):
        return
    types = family_names(tree)
    for path in tree.sources:
        if path.startswith(FAMILIES) or is_test(path):
            continue
        for line, text in literals(tree.code[path]):
            a_type = text in types and not path.startswith(SPLIT_NAMES)
            for name in re.findall(ARCHITECTURE_CLASS, text) + [text] * a_type:
                report.error(path, line, "families", f'"{name}" is spelled only in {FAMILIES}')


def served_routes(tree):
    """(path, line, route) of the server's tables of routes; a prefix may be a constant."""
    for path in tree.sources:
        if not path.startswith("src/server/") or is_test(path):
            continue
        code = tree.code[path]
        constants = dict(re.findall(r'string_view\s+(k\w+)\s*=\s*"([^"]*)"', code))
        for line, match in matches(code, r'RouteEntry\{"[A-Z]+",\s*(?:"([^"]+)"|(k\w+))'):
            yield path, line, match.group(1) or constants.get(match.group(2), match.group(2))


def check_routes(tree, report):
    """Each route is named by a test: those in front of it ("/v1/x" for "/x") do not count."""
    tests = "\n".join(text for path, text in tree.text.items()
                      if path.startswith(("tests/e2e/", "tests/issues/"))
                      or path.startswith("src/server/") and is_test(path))
    routes = list(served_routes(tree))
    if not routes and ROUTE_TABLE in tree.code:
        report.error(ROUTE_TABLE, 1, "route", "no route found; adapt served_routes()")
    for path, line, route in routes:
        if not re.search(r"(?<!/v1)(?<![A-Za-z_.-])" + re.escape(route) + r"(?![\w/-])", tests) \
                and not (route.endswith("/") and route in tests):
            report.error(path, line, "route", f"no test in src/server or tests/e2e names {route}")


def check_kernels(tree, report):
    """Each CUDA family is in the registry, which the benchmarks and tests iterate."""
    registry = tree.code.get(GEMM_REGISTRY, "")
    for path in tree.sources:
        if "/cuda/kernels/" not in path or is_test(path):
            continue
        for line, match in matches(tree.code[path], r"^(?:constexpr |const )+GemmEntry (k\w+)\b"):
            listed = re.sub(r"(?m)^extern .*$", "", registry)
            if not re.search(rf"\b{match.group(1)}\b", listed):
                report.error(path, line, "registry", f"{match.group(1)} is not in {GEMM_REGISTRY}: "
                             "no model runs it, no test and no benchmark sees it")
    benches = "".join(code for path, code in tree.code.items() if "bench" in path)
    for table in ("all_schemes()", "gemm_entries()") if registry else ():
        if table not in benches:
            report.error(GEMM_REGISTRY, 1, "registry", f"no benchmark iterates {table}")


def check_words(tree, report):
    for path, text in tree.text.items():
        if path.startswith(PROSE_DATA) or path == "LICENSE":
            continue
        for line, match in matches(text, MACHINE_PATHS):
            report.error(path, line, "machine-path", f"{match.group(0)}/ exists on one machine only")
        for line, match in matches(text, REGISTRY_HOSTS):
            report.error(path, line, "registry-host", f"{match.group(0)} is the user's choice")
        for line, match in matches(text, UNFINISHED):
            report.error(path, line, "unfinished", f'"{match.group(0)}": finish it or leave it out')


def spans(text):
    """Yields (line number, code) for inline code and fenced lines of a Markdown text."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            yield number, line, True
        else:
            for match in re.finditer(r"`([^`]+)`", line):
                yield number, match.group(1), False


def expand_braces(word):
    match = re.search(r"\{([^{}]*)\}", word)
    if not match:
        return [word]
    return [result for part in match.group(1).split(",")
            for result in expand_braces(word[:match.start()] + part + word[match.end():])]


def check_doc_paths(tree, report):
    for path in tree.docs:
        base = (tree.root / path).parent
        for line, match in matches(tree.text[path], r"\]\(([^)#\s]+)[^)]*\)"):
            if "://" not in match.group(1) and not (base / match.group(1)).exists():
                report.error(path, line, "doc-path", f"link to missing {match.group(1)}")
        for line, code, _ in spans(tree.text[path]):
            for word in re.findall(r"(?<![\w./$<{-])[\w.{][\w./{},*-]*", code):
                word = word.rstrip(".,")
                if not word.startswith(tuple(top + "/" for top in TOP_FOLDERS)):
                    continue
                for name in expand_braces(word):
                    if not glob.glob(str(tree.root / name)):
                        report.error(path, line, "doc-path", f"{name} does not exist")


def check_doc_types(tree, report):
    """A `PascalCase` name in a page is a word of the sources."""
    words = set()
    for path in tree.sources:
        words |= set(re.findall(r"\b[A-Z]\w*", tree.code[path]))
    for path in tree.docs:
        for line, code, fenced in spans(tree.text[path]):
            if fenced:
                continue
            for name in re.findall(r"(?<![\w./-])[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+(?![\w./-])", code):
                if name not in words and name not in FOREIGN_TYPES:
                    report.error(path, line, "doc-type", f"{name} is in no source")


def help_flags(binary):
    """All --flags of the binary and its subcommands, or None when it cannot run."""
    def text_of(arguments):
        return subprocess.run([binary, *arguments, "--help"], capture_output=True, text=True,
                              timeout=20).stdout

    def subcommands(text):
        section = re.search(r"Subcommands:\n((?:[ ]+.*\n?)+)", text)
        return re.findall(r"^  ([a-z][\w-]*)", section.group(1), re.MULTILINE) if section else []

    flags, pending = set(), [[]]
    while pending:
        arguments = pending.pop()
        text = text_of(arguments)
        flags |= set(re.findall(r"--[a-z][a-z0-9-]*", text))
        if len(arguments) < 2:
            pending += [arguments + [name] for name in subcommands(text)]
    return flags


def script_flags(tree, page):
    """The flags of the Python scripts that `page` names, as they tell them to argparse."""
    return {flag for name in re.findall(r"(?<![\w/])[\w/.-]+\.py\b", tree.text[page])
            for flag in re.findall(r"""add_argument\(["'](--[a-z][a-z0-9-]*)""", tree.text.get(name, ""))}


def program_flags(tree, page):
    """The flags of the programs for developers that `page` names, of their main files."""
    return {flag for path, text in tree.text.items() if path.endswith(("_main.cc", "_main.cu"))
            and re.search(rf"(?<![\w/]){pathlib.Path(path).stem.removesuffix('_main')}(?!\w)",
                          tree.text[page])
            for flag in re.findall(r'"(--[a-z][a-z0-9-]*)', text)}


def check_doc_flags(tree, report, known):
    """`known`: the flags of nibble --help."""
    shared = known | FOREIGN_FLAGS
    for path, text in tree.text.items():
        if path.startswith("scripts/") or path == ".ci/run":
            shared = shared | set(re.findall(r"(--[a-z][a-z0-9-]*)(?=\)|\s*\|)", text))
    for path in tree.docs:
        allowed = shared | script_flags(tree, path) | program_flags(tree, path)
        for line, code, _ in spans(tree.text[path]):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code):
                if flag not in allowed:
                    report.error(path, line, "doc-flag", f"{flag} is in no --help")


def weak_symbols(listing):
    """Weak std:: definitions in the output of `nm -C`: the linker may keep this copy for all."""
    return [line.split(maxsplit=2)[2] for line in listing.split("\n")
            if re.match(r"^[0-9a-f]+ [WV] ", line) and "std::" in line]


def isa_objects(build):
    """Objects compiled for an instruction set, which their own name or their library's has."""
    root = pathlib.Path(build)
    return [path for path in sorted([*root.glob("src/**/*.o"), *root.glob("bench/**/*.o")])
            if re.search(r"avx|amx|vnni", str(path.relative_to(root)))]


def check_isa_objects(build, report):
    for path in isa_objects(build):
        listing = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True).stdout
        for symbol in weak_symbols(listing):
            report.error(path.relative_to(build), 0, "isa-object", f"exports weak {symbol}")


def cache_value(build, name):
    cache = pathlib.Path(build) / "CMakeCache.txt"
    match = cache.exists() and re.search(rf"^{name}:\w+=(.*)$", cache.read_text(), re.MULTILINE)
    return match.group(1) if match else ""


def check_tree(tree, report):
    """All rules that need only the files."""
    for rule in (check_includes, check_third_party, check_lengths, check_functions,
                 check_pragma_once, check_calls, check_scheme_literals, check_family_literals,
                 check_routes, check_kernels, check_words, check_doc_paths, check_doc_types):
        rule(tree, report)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", help="build folder with the nibble binary and the objects")
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[2]
    tree, report = Tree(root), Report()
    check_tree(tree, report)
    if options.build:
        binary = pathlib.Path(options.build) / "tools" / "nibble"
        if binary.exists():
            check_doc_flags(tree, report, help_flags(str(binary)))
        if not cache_value(options.build, "NIBBLE_SANITIZE"):
            check_isa_objects(options.build, report)
    for finding in report.warnings + report.errors:
        print(finding)
    kinds = collections.Counter(warning.split(": ")[2] for warning in report.warnings)
    print(f"house: {len(report.errors)} errors, {len(report.warnings)} warnings "
          f"({', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))}), "
          f"{len(tree.sources)} sources, {len(tree.docs)} documents")
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
