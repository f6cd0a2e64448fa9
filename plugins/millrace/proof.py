"""Proof of completion, from what is stored: never from a task's colour, a `_SUCCESS` file or a list in XCom."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from millrace.errors import IncompleteError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.records import Completion, FileRef, Manifest, ShardEntry


def prove_shard(lake: Lake, paths: RunPaths, shard: ShardEntry) -> Completion:
    """The shard's completion record, checked against the manifest and the answer file it names.

    Raises IncompleteError when there is none, or when its counts or file disagree.
    """
    done = Completion.load_or_none(lake, paths.complete(shard.shard_id))
    if done is None:
        raise IncompleteError(
            f"shard {shard.shard_id} of {paths.root} has no completion record. Clear this shard's `infer` task."
        )
    answered = sum(done.statuses.values())
    if not done.requests == shard.requests == answered == done.answers.rows:
        raise IncompleteError(
            f"shard {shard.shard_id} of {paths.root}: the manifest has {shard.requests} requests, its completion record "
            f"{done.requests} ({answered} with a status, {done.answers.rows} in the file). Do not publish; report this as a bug."
        )
    done.answers.check(lake)
    return done


def prove_shards(lake: Lake, paths: RunPaths, manifest: Manifest) -> list[Completion]:
    """Completion records of every shard of a manifest, in its order. One error names all shards that are not proved."""

    def prove(shard: ShardEntry) -> Completion | str:
        try:
            return prove_shard(lake, paths, shard)
        except IncompleteError as error:
            return str(error)

    # A record is one small read; up to 1,000 of them on an object store are worth overlapping.
    with ThreadPoolExecutor(max_workers=16) as pool:
        results = list(pool.map(prove, manifest.shards))
    missing = [r for r in results if isinstance(r, str)]
    if missing:
        raise IncompleteError(
            f"{len(missing)} of {len(manifest.shards)} shards of {paths.root} are not complete; expected "
            f"{len(manifest.shards)}, found {len(manifest.shards) - len(missing)}.\n" + "\n".join(missing[:20])
        )
    return [r for r in results if isinstance(r, Completion)]


def answer_files(lake: Lake, paths: RunPaths) -> list[FileRef]:
    """The files that hold the answers of a finished run, each there with its size.

    Raises NotFoundError when the run has no manifest, IncompleteError when a shard or a file is missing.
    """
    manifest = Manifest.load(lake, paths.manifest)
    files = [*manifest.reused_files, *(done.answers for done in prove_shards(lake, paths, manifest))]
    for file in files:
        file.check(lake)
    return files
