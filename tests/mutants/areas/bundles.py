"""Bundles of kernels: which are taken, what is said of the others, records, and the presets."""

from __future__ import annotations

from ..mutant import Mutant, mutants

INSTALLED = ("kernels/bundles/test_installed.py",)
MANIFEST = ("kernels/bundles/test_manifest.py",)
RECORD = ("kernels/tilelang/build/test_record.py",)
CONTENT = ("kernels/tilelang/bundling/test_content.py",)
COMMAND = ("cli/test_bundle.py",)
PRESETS = ("bench/test_presets.py::test_default_has_unaligned_and_deterministic_calls",)

MUTANTS: list[Mutant] = [
    *mutants(
        "kernels/bundles/installed.py",
        INSTALLED,
        {
            "bundles: the lock is not asked": ("if source is None else entry.source == source", "if True else False"),
            "bundles: of any TileLang": ('.get("tilelang") != needed:', '.get("tilelang") is None:'),
            "bundles: of any toolkit": ('.partition(".")[0] != major))', '.partition(".")[0] is None))'),
            "bundles: damaged metadata of another package": (
                "    except Exception:  # whatever the parser raises for the metadata of any package\n",
                "    except StopIteration:\n",
            ),
            "bundles: a damaged library is loaded": ("        if checksum(path) == sha256:\n", "        if True:\n"),
            "bundles: of any architecture": (" if each.manifest.arch == arch)", ")"),
            "bundles: the first bundle has all": (
                "and _is_current(bundle, key, modules, arch) and _is_intact(bundle, key):",
                "and _is_current(bundle, key, modules, arch):\n            if not _is_intact(bundle, key):\n"
                "                return None",
            ),
            "bundles: a warning for each kernel": (
                "@functools.cache\ndef _warn_of_version",
                "def _warn_of_version",
            ),
            "bundles: its package is imported": (
                "        spec = importlib.util.find_spec(module)\n",
                "        spec = importlib.import_module(module).__spec__\n",
            ),
            "bundles: a runtime without a check": (" and _has_runtime(each)", ""),
        },
    ),
    *mutants(
        "kernels/bundles/manifest.py",
        MANIFEST,
        {
            "bundles: kernels outside of the folder": (
                "names = [*manifest.runtime, *manifest.kernels]",
                "names = [*manifest.runtime]",
            ),
            "bundles: any format": ("        if found != FORMAT:\n", "        if found is None:\n"),
        },
    ),
    *mutants(
        "kernels/tilelang/build/record.py",
        RECORD,
        {
            "record: every line is read again": ("        seen.add(line)\n", ""),
            "record: an error stops the application": (
                "except (OSError, TypeError, ValueError) as error:\n        if path",
                "except ZeroDivisionError as error:\n        if path",
            ),
            "record: classes of the main script": ("if of_main := text.of_main(str(job)):", "if of_main := []:"),
            "record: the file begins anew": ("os.O_WRONLY | os.O_APPEND | os.O_CREAT", "os.O_WRONLY | os.O_CREAT"),
        },
    ),
    *mutants(
        "kernels/tilelang/build/library.py",
        INSTALLED,
        {
            "bundles: the cache's key is all that counts": ("    if bundled is not None:\n", "    if False:\n"),
        },
    ),
    *mutants(
        "kernels/tilelang/bundling/content.py",
        CONTENT,
        {
            "bundles: records of older versions stay": ('cast("KernelJob", job), SOURCE)', 'cast("KernelJob", job))'),
            "bundles: a kernel without its source's digest": (
                "if library is None or not isinstance(source, str) else",
                "if library is None else",
            ),
        },
    ),
    *mutants(
        "cli/run_bundle.py",
        COMMAND,
        {
            "bundle: a file's kernels of all architectures": (
                "jobs = [job for job in found if job.arch == arch]",
                "jobs = found",
            ),
            "record: the exit status is lost": ("    return status\n", "    return 0\n"),
        },
    ),
    *mutants(
        "bench/presets.py",
        PRESETS,
        {
            "presets: no unaligned tensors": (
                "    calls += [replace(call, aligned=False) for call in plain]\n",
                "",
            ),
            "presets: no fixed order of sums": (
                "    calls += [replace(call, deterministic=True) for call in plain]\n",
                "",
            ),
        },
    ),
]
