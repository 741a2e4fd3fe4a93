"""Proves that each rule of check.py accepts a good tree and fails on a bad one."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import check  # noqa: E402
import functions  # noqa: E402
import summarize_tests  # noqa: E402

SCHEMES = 'QuantScheme{"bf16", {}}, QuantScheme{"w9a9_test", {}}\n'
GOOD = {
    "src/base/a.h": "#pragma once\n",
    "src/engine/b.cc": '#include "base/a.h"\n// getenv("X") and try { in a comment\n',
    "src/quant/schemes.cc": SCHEMES,
    "tools/main.cc": "int main() { try { } catch (int) { } }\n",
    "docs/page.md": "See `src/base/a.h`, `src/{base,engine}/*` and [main](../tools/main.cc).\n",
}


def run(files, rule=check.check_tree, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        report = check.Report()
        rule(check.Tree(folder, sorted(files)), report, *arguments)
        return report


class RulesTest(unittest.TestCase):
    def expect(self, rule, name, text, count=1):
        report = run({**GOOD, name: text})
        found = [error for error in report.errors if f": {rule}: " in error]
        self.assertEqual(len(found), count, report.errors)
        self.assertEqual(len(report.errors), count, report.errors)

    def test_good_tree_passes(self):
        self.assertEqual(run(GOOD).errors, [])

    def test_include_upwards(self):
        self.expect("includes", "src/base/c.cc", '#include "engine/b.h"\n')

    def test_include_sideways(self):
        self.expect("includes", "src/layers/c.cc", '#include "kvcache/b.h"\n')

    def test_include_of_benchmarks(self):
        self.expect("includes", "src/backend/c.cc", '#include "bench/kernels/b.h"\n')
        self.expect("includes", "tools/c.cc", '#include "bench/kernels/b.h"\n')
        includes = '#include "bench/a.h"\n#include "tools/b.h"\n#include "base/a.h"\n'
        self.assertEqual(run({**GOOD, "bench/kernels/c.cc": includes}).errors, [])

    def test_include_relative(self):
        self.expect("includes", "src/layers/c.cc", '#include "../base/a.h"\n')

    def test_unknown_folder(self):
        self.expect("levels", "src/attic/c.cc", "\n")

    def test_json_library_elsewhere(self):
        self.expect("third-party", "src/text/c.cc", "#include <boost/json.hpp>\n")

    def test_cuda_header_elsewhere(self):
        self.expect("third-party", "src/layers/c.cc", "#include <cuda_runtime.h>\n")

    def test_intrinsics_elsewhere(self):
        self.expect("third-party", "src/ops/c.cc", "#include <immintrin.h>\n")
        self.expect("third-party", "bench/kernels/c.cc", "#include <immintrin.h>\n")

    def test_too_long(self):
        self.expect("length", "src/base/c.cc", "\n" * 801)

    def test_length_target_only_warns(self):
        report = run({**GOOD, "src/base/c.cc": "\n" * 401})
        self.assertEqual((len(report.errors), len(report.warnings)), (0, 1))

    def expect_warnings(self, kind, name, text, count):
        report = run({**GOOD, name: text})
        self.assertEqual(report.errors, [])
        found = [warning for warning in report.warnings if f": {kind}: " in warning]
        self.assertEqual(len(found), count, report.warnings)

    def test_length_of_kernels(self):
        guard = "#pragma once\n"
        for name, target in (("src/backend/cuda/kernels/c.cu", 600), ("src/backend/cuda/c.cuh", 600),
                             ("src/backend/cpu/amx/c.h", 400), ("src/quantizer/kernels/c.h", 400),
                             ("src/backend/cpu/c.h", 150), ("src/backend/cpu/c_test.cc", 600)):
            self.expect_warnings("length", name, guard + "\n" * (target - 1), 0)
            self.expect_warnings("length", name, guard + "\n" * target, 1)
        self.expect("length", "src/backend/cuda/kernels/c.cu", "\n" * 801)

    def test_length_of_functions(self):
        for head in ("int f(int a) {", "template <int N>\n__global__ void __launch_bounds__(N)\n"
                     "    f(int a) {", "auto f() -> int {", "class C {\n void f() const {"):
            tail = "}\n};\n" if head.startswith("class") else "}\n"
            self.expect_warnings("function", "src/backend/cuda/c.cu", head + "\n" * 59 + tail, 0)
            self.expect_warnings("function", "src/backend/cuda/c.cu", head + "\n" * 60 + tail, 1)
            self.expect("function", "src/backend/cuda/c.cu", head + "\n" * 150 + tail)

    def test_length_of_functions_in_tests(self):
        self.expect_warnings("function", "src/base/c_test.cc", "void f() {" + "\n" * 100 + "}\n", 0)
        self.expect("function", "src/base/c_test.cc", "void f() {" + "\n" * 150 + "}\n")

    def test_parameters(self):
        def declared(text):
            return f"#pragma once\nnamespace nibble {{\n{text}\n}}  // namespace nibble\n"

        for text, count in (("void f(int a, int b, int c, int d);", 0),
                            ("void f(int a, int b, int c, int d, int e);", 1),
                            ("void f(std::map<int, int> a, int b, int c, int d = g(1, 2));", 0),
                            ("class C {\n public:\n  C(int a, bool b);\n};", 1),
                            ("class C {\n  C(int a, bool b);\n};", 0),
                            ("struct S {\n  void f(bool b) { if (b) { } }\n};", 1),
                            ("Json json(bool value);\nbool g(const bool* many);", 0),
                            ("using F = void (*)(int, int, int, int, bool);", 0)):
            self.expect_warnings("parameters", "src/base/c.h", declared(text), count)
            self.expect_warnings("parameters", "src/backend/cpu/kernels/c.h", declared(text), 0)

    def test_no_pragma_once(self):
        self.expect("header", "src/base/c.h", "int x();\n")

    def test_getenv(self):
        self.expect("getenv", "src/text/c.cc", 'auto* v = std::getenv("X");\n')

    def test_try(self):
        self.expect("try", "src/text/c.cc", "void f() { try { } catch (...) { } }\n")

    def test_try_in_server(self):
        self.expect("try", "src/server/c.cc", "try {\n}\n")
        self.expect("try", "src/server/http_connection.cc", "try {\n}\ntry {\n}\ntry {\n}\n")

    def test_exit(self):
        self.expect("exit", "src/text/c.cc", "void f() { std::exit(1); }\n")

    def test_scheme_literal(self):
        self.expect("schemes", "src/model/c.cc", 'auto x = "w9a9_test";\n')

    def test_scheme_table_without_schemes(self):
        self.expect("schemes", "src/quant/schemes.cc", "\n")

    def test_scheme_literal_allowed_in_dialect_and_test(self):
        literal = 'auto x = "w9a9_test"; auto y = "bf16";\n'
        files = {"src/checkpoint/dialects/c.cc": literal, "src/model/c_test.cc": literal}
        self.assertEqual(run({**GOOD, **files}).errors, [])

    def test_scheme_within_a_message(self):
        self.expect("schemes", "src/model/c.cc", 'auto x = "use --scheme w9a9_test, or none";\n')
        self.expect("schemes", "tools/c.cc", 'auto x = R"(\n use w9a9_test)";\n')
        fine = '// w9a9_test\nauto x = "gemm_w9a9_test_sm90"; auto y = "w9a9_testing";\n'
        self.assertEqual(run({**GOOD, "src/model/c.cc": fine}).errors, [])

    def test_scheme_that_is_a_quant_method(self):
        files = {**GOOD, "src/quant/schemes.cc": SCHEMES + 'QuantScheme{"mxfp4", {}}\n',
                 "src/checkpoint/c.cc": 'auto x = "quant_method mxfp4";\n'}
        self.assertEqual(run(files).errors, [])
        self.assertEqual(len(run({**files, "src/model/c.cc": 'auto x = "no mxfp4";\n'}).errors), 1)

    def test_family_names(self):
        family = ('const Family kLlama = {.classes = {"LlamaForCausalLM"}, '
                  '.model_types = {"llama", "llama_old"}};\n')
        spelled = 'auto x = "LlamaForCausalLM"; auto y = "llama_old"; auto z = "a llama eats";\n'
        files = {**GOOD, "src/engine/c.cc": spelled}
        self.assertEqual(run(files).errors, [])  # there is no folder of families
        files["src/arch/families/llama.cc"] = family
        files["src/engine/c_test.cc"] = spelled
        found = run(files, check.check_family_literals).errors
        self.assertEqual(len(found), 2, found)
        self.assertTrue(all("src/engine/c.cc" in error for error in found), found)

    def test_route_without_test(self):
        table = 'RouteEntry{"GET", "/metrics", f},\n    RouteEntry{"POST", "/v1/metrics", f},\n'
        tests = {"src/server/app_test.cc": 'get("/v1/metrics?x=1"); get("/metrics/x");\n'}
        report = run({**GOOD, **tests, "src/server/app.cc": table})
        self.assertEqual(len(report.errors), 1, report.errors)
        self.assertIn("names /metrics", report.errors[0])
        tests["tests/e2e/test_x.py"] = 'get(f"{url}/metrics")\n'
        self.assertEqual(run({**GOOD, **tests, "src/server/app.cc": table}).errors, [])

    def test_route_table_without_routes(self):
        self.expect("route", "src/server/app.cc", "int routes;\n")

    def test_route_that_is_a_prefix(self):
        table = 'constexpr std::string_view kPrefix = "/v1/models/";\nRouteEntry{"GET", kPrefix, f}\n'
        self.expect("route", "src/server/app.cc", table)
        tests = {"src/server/app_test.cc": 'get("/v1/models/storyteller");\n'}
        self.assertEqual(run({**GOOD, **tests, "src/server/app.cc": table}).errors, [])

    def test_kernel_outside_the_registry(self):
        files = {**GOOD, "src/backend/cuda/kernels/c.cu": "const GemmEntry kNew = {};\n",
                 "src/backend/cuda/registry.cc": "extern const GemmEntry kNew;\n",
                 "tools/bench.cc": "f(all_schemes(), gemm_entries());\n"}
        self.assertEqual(len(run(files).errors), 1)
        files["src/backend/cuda/registry.cc"] += "auto x = {&kNew};\n"
        self.assertEqual(run(files).errors, [])

    def test_benchmark_that_skips_the_tables(self):
        files = {**GOOD, "src/backend/cuda/registry.cc": "\n", "tools/bench.cc": "f();\n"}
        self.assertEqual(len(run(files).errors), 2)

    def test_unknown_type_in_page(self):
        self.expect("doc-type", "docs/other.md", "A `MissingType` and `Result<T>`.\n")
        files = {"docs/other.md": "A `KnownType<T>`.\n", "src/base/c.cc": "struct KnownType {};\n"}
        self.assertEqual(run({**GOOD, **files}).errors, [])

    def test_machine_path(self):
        self.expect("machine-path", "scripts/c.sh", "cd /" + "home/me\n")

    def test_registry_host(self):
        self.expect("registry-host", "scripts/c.sh", "pip -i https://py" + "pi.org/simple\n")

    def test_unfinished(self):
        self.expect("unfinished", "src/base/c.cc", "// TO" + "DO: more\n")

    def test_missing_doc_path(self):
        self.expect("doc-path", "docs/other.md", "See `src/base/missing.h`.\n")

    def test_missing_link(self):
        self.expect("doc-path", "docs/other.md", "See [it](missing.md).\n")

    def test_missing_path_in_fence(self):
        self.expect("doc-path", "docs/other.md", "```\nscripts/missing.sh --once\n```\n")

    def test_unknown_flag(self):
        files = {**GOOD, "docs/flags.md": "`nibble x --known --unknown`\n"}
        report = run(files, check.check_doc_flags, {"--known"})
        self.assertEqual(len(report.errors), 1, report.errors)

    def test_flags_of_scripts_that_a_page_names(self):
        files = {**GOOD, "bench/x.py": 'parser.add_argument("--small", action="store_true")\n',
                 "docs/flags.md": "`bench/x.py --small --large`\n", "docs/other.md": "`--small`\n"}
        report = run(files, check.check_doc_flags, set())
        self.assertEqual(sorted(str(error).split(": ")[-1] for error in report.errors),
                         ["--large is in no --help", "--small is in no --help"])

    def test_weak_symbols(self):
        listing = ("0000000000000000 W std::vector<int>::push_back(int&&)\n"
                   "0000000000000000 T nibble::gemm_avx2(int)\n"
                   "                 U std::terminate()\n")
        self.assertEqual(check.weak_symbols(listing), ["std::vector<int>::push_back(int&&)"])

    def test_isa_objects(self):
        names = ["src/backend/CMakeFiles/nibble_kernels_amx.dir/cpu/kernels/rows.cc.o",
                 "src/quantizer/CMakeFiles/nibble_quantizer.dir/kernels/row_kernels_avx512.cc.o",
                 "bench/CMakeFiles/nibble_bench.dir/ceilings/ceilings_avx2.cc.o"]
        others = ["src/backend/CMakeFiles/nibble_kernels_scalar.dir/cpu/kernels/rows.cc.o"]
        with tempfile.TemporaryDirectory() as folder:
            for name in names + others:
                path = pathlib.Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            found = [str(path.relative_to(folder)) for path in check.isa_objects(folder)]
        self.assertEqual(sorted(found), sorted(names))


class FunctionsTest(unittest.TestCase):
    def test_finds_them_where_clang_format_puts_them(self):
        code = ('#define BRACE {\n'
                "namespace {\nconstexpr char kOpen = '{';\nconst Entry kEntry = {\"f\", f(1)};\n"
                'int f(const char* text = "{") {\n  auto g = [](int x) { return x; };\n}\n'
                "}\n"
                "class C final : public B<1> {\n public:\n  C(int a, int b)\n"
                "      : a_{a}, b_(b) {\n    f();\n  }\n  bool operator==(const C&) const = default;\n"
                " private:\n  int a_ = 0;\n  Map<int, int> m_{1, 2};\n};\n"
                "Status C::run() {\n  if (a_) {\n  }\n}\n")
        found = [(function.name, function.line, function.body_lines, len(function.parameters),
                  function.public) for function in functions.functions(code)]
        self.assertEqual(found, [("f", 5, 3, 1, False), ("C", 11, 3, 2, True),
                                 ("operator==", 15, 0, 1, True), ("C::run", 20, 4, 0, True)])


class SummaryTest(unittest.TestCase):
    def summarize(self, **files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                (pathlib.Path(folder) / name.replace("_", ".")).write_text(text)
            return summarize_tests.summarize(pathlib.Path(folder))

    def test_counts_both_reports(self):
        passed, failed, skipped = self.summarize(
            ctest_xml='<testsuite><testcase name="a" status="run"/>'
            '<testcase name="b" status="fail"><failure message=""/></testcase>'
            '<testcase name="c" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>'
            "<system-out>x.cc:3: Skipped\nno shared data\n\n</system-out></testcase></testsuite>",
            pytest_xml='<testsuites><testsuite><testcase name="d"/><testcase name="e">'
            '<skipped message="no client"/></testcase></testsuite></testsuites>')
        self.assertEqual((passed, failed), (2, ["b"]))
        self.assertEqual(dict(skipped), {"no shared data": 1, "no client": 1})

    def test_missing_report_is_a_failure(self):
        self.assertEqual(self.summarize()[1], ["ctest wrote no report"])

    def test_broken_pytest_is_a_failure(self):
        report = '<testsuite><testcase name="a" status="run"/></testsuite>'
        self.assertEqual(self.summarize(ctest_xml=report, pytest_broken="stopped")[1], ["stopped"])


if __name__ == "__main__":
    unittest.main()
