"""Proves that each rule of check.py accepts a good tree and fails on a bad one."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import check  # noqa: E402
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

    def test_too_long(self):
        self.expect("length", "src/base/c.cc", "\n" * 801)

    def test_length_target_only_warns(self):
        report = run({**GOOD, "src/base/c.cc": "\n" * 401})
        self.assertEqual((len(report.errors), len(report.warnings)), (0, 1))

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

    def test_weak_symbols(self):
        listing = ("0000000000000000 W std::vector<int>::push_back(int&&)\n"
                   "0000000000000000 T nibble::gemm_avx2(int)\n"
                   "                 U std::terminate()\n")
        self.assertEqual(check.weak_symbols(listing), ["std::vector<int>::push_back(int&&)"])


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
