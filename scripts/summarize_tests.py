"""Adds up the JUnit reports of a folder and prints "N passed, N failed, N skipped".

Usage: summarize_tests.py FOLDER. Reads ctest.xml (required) and pytest.xml; a *.broken file counts
as one failure and a *.skipped file as one skipped test, each with its text as the reason. Skipped
tests are listed, grouped by reason. Exits 1 when a test failed or when nothing ran.
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree


def skip_reason(case):
    """The reason a test gave: pytest puts it in the message, GoogleTest prints it after 'Skipped'."""
    output = case.findtext("system-out") or ""
    match = re.search(r"Skipped\n(.+)", output)
    if match:
        return match.group(1).strip()
    message = case.find("skipped").get("message", "")
    return "no reason given" if "SKIP_REGULAR_EXPRESSION" in message else message


def read_report(path):
    """Returns (passed, failed names, {reason: count}) of one JUnit file."""
    passed, failed, skipped = 0, [], collections.Counter()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name"))
        elif case.find("skipped") is not None or case.get("status") == "disabled":
            skipped[skip_reason(case) if case.find("skipped") is not None else "disabled"] += 1
        elif case.get("status") == "notrun":
            failed.append(case.get("name") + " (not run)")
        else:
            passed += 1
    return passed, failed, skipped


def summarize(folder):
    """Returns (passed, failed names, skipped reasons) over all reports of the folder."""
    passed, failed, skipped = 0, [], collections.Counter()
    if not (folder / "ctest.xml").exists():
        failed.append("ctest wrote no report")
    for path in sorted(folder.glob("*.xml")):
        some_passed, some_failed, some_skipped = read_report(path)
        passed += some_passed
        failed += some_failed
        skipped += some_skipped
    failed += [path.read_text().strip() for path in sorted(folder.glob("*.broken"))]
    for path in sorted(folder.glob("*.skipped")):
        skipped[path.read_text().strip()] += 1
    return passed, failed, skipped


def main():
    passed, failed, skipped = summarize(pathlib.Path(sys.argv[1]))
    for reason, count in sorted(skipped.items()):
        print(f"skipped {count}: {reason}")
    for name in failed:
        print(f"FAILED: {name}")
    print(f"{passed} passed, {len(failed)} failed, {sum(skipped.values())} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
