"""One agent, alone in its process: needs numpy, onnxruntime and the files of its export.

    python agent.py FOLDER

It reads a line for each thing that it is asked, ``["speak", {"observation": [...]}]``, and answers
with a line; both are JSON. What it is asked are methods of ``Player``.
"""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder.parent))  # where the export has put player.py

from player import Player  # noqa: E402

player = Player(folder)
print(json.dumps([name for name in ("torch", "torchrl_marl") if name in sys.modules]), flush=True)
for line in sys.stdin:
    method, arguments = json.loads(line)
    answer = getattr(player, method)(**arguments)
    print(json.dumps(None if answer is None else answer.tolist()), flush=True)
