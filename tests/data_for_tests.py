"""Records of our own in the forms of the upstream files, data sets that have them, and the real
files' folder.
"""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import noiser.data
from noiser.data import Provenance, Recipe, UpstreamFile, loading
from noiser.registry import Registry


def known_record(number, subject, rest, answer, relation="P1"):
    return {
        "known_id": number,
        "subject": subject,
        "attribute": answer,
        "template": "{} " + rest,
        "prediction": f" {answer}, of course",
        "prompt": f"{subject} {rest}",
        "relation_id": relation,
    }


KNOWN_RECORDS = [
    known_record(0, "The moss", "on our roof is", "green"),
    known_record(1, "Grandfather's kettle", "sings in the key of", "C", "P2"),
    known_record(2, "The moss", "on our roof is", "green"),
    known_record(3, "Every second baker", "in town is named", "Paul", "P2"),
]

LONGRA_RECORDS = [  # 0 and 1 sound, 2 to 4 malformed as the published ones are
    {"id": number, "prompt": prompt, "target": target, "relative": relative, "type": kind}
    for number, (kind, target, relative, prompt) in enumerate(
        [
            (
                "capital-world",
                "Oslo",
                "Norway",
                "After a week in Norway, we were tired. (The cat slept). We rested in the capital,",
            ),
            (
                "gram1-adjective-to-adverb",
                "slow",
                "slowly",
                "She sang slowly, and for long. (It rained, then snowed.) Her song was",
            ),
            (
                "currency",
                "Denmark",
                "krone",
                "On the long road we reached, and stopped. (My shoe was wet). There we paid with "
                "the krone",
            ),
            (
                "gram9-plural-verbs",
                "walk",
                "walks",
                "They said we. (The cat slept). Then he also walks",
            ),
            (
                "gram8-plural",
                "apple",
                "apples",
                "Today I almost forgot my green at home. (A bus came.) So I have no apples",
            ),
        ]
    )
]


def upstream(name, content, address="http://127.0.0.1:9"):
    digest = hashlib.sha256(content).hexdigest()
    return UpstreamFile(name=name, url=f"{address}/{name}", size=len(content), sha256=digest)


def register(monkeypatch, recipes):
    """Lets these be the data sets, by name with a file and its reader, and no folder of the user's
    be known.
    """
    registry: Registry[Recipe] = Registry("data set", "noiser.data.none")
    for name, (file, read) in recipes.items():
        made = Recipe(
            source=Provenance(files=(file,), licence="ours", citation="nobody"), read=read
        )
        registry.register(name, lambda made=made: made, summary=f"facts of {name}")
    for module in (noiser.data, loading):
        monkeypatch.setattr(module, "DATA_SETS", registry)
    monkeypatch.delenv("NOISER_DATA", raising=False)


def as_json(records):
    return json.dumps(records, indent=1).encode()


def _real_folder():
    """The real files under their upstream names: `$NOISER_DATA`, or links to shared/data beside the
    checkout.
    """
    if chosen := os.environ.get("NOISER_DATA"):
        return Path(chosen).expanduser()
    shared = Path(__file__).parents[2] / "shared" / "data"
    if not shared.is_dir():
        return None
    links = Path(tempfile.mkdtemp(prefix="noiser-data-"))
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    for name, place in NAMES.items():
        (links / name).symlink_to(shared / place)
    return links


NAMES = {
    "known_1000.json": "known/known_1000.json",
    "LongRA.json": "longra/LongRA.qasemii-Noiser.json",
    "wikitext.txt": "wikibio/reagent_wikitext.txt",
    "dataset-generated.json": "wikibio/wiki_bio_gpt3_first119.KAIST-dataset-generated.json",
    "longra_573_rendered.json": "longra/longra_573_rendered.json",
}
REAL = _real_folder()
NO_REAL = "the data sets' files are neither in NOISER_DATA nor in ../shared/data"
