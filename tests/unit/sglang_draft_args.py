"""Run by SGLang's interpreter: its own parser, checks and defaults take command lines.

Reads a list of argument lists as JSON, and prints what became of each: the fields named, or the error.
"""

import contextlib
import io
import json
import sys

from sglang.srt.server_args import prepare_server_args

FIELDS = (
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "speculative_use_rejection_sampling", "dtype",
)  # fmt: skip


def main() -> None:
    found = []
    for arguments in json.loads(sys.stdin.read()):
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told):
                args = prepare_server_args(arguments)
            found.append({name: getattr(args, name) for name in FIELDS})
        except (SystemExit, ValueError, NotImplementedError) as err:
            found.append({"error": f"{err} {told.getvalue()[-500:]}"})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
