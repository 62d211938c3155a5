"""Run any exported policy, sampled or with memory: python deploy_onnx_any.py FOLDER."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


class Policy:
    """Chooses actions for ``rows`` environments at once, and keeps the memory of each."""

    def __init__(self, folder, rows=1, seed=0):
        about = json.loads((Path(folder) / "policy.json").read_text())
        self.session = onnxruntime.InferenceSession(Path(folder) / about["file"])
        self.ports = {port["name"]: port for port in about["inputs"]}
        self.names = [port["name"] for port in about["outputs"]]
        self.zeros = lambda p: np.zeros((rows, *p["shape"][1:]), p["dtype"])
        self.state = self.zeros(self.ports["state"]) if "state" in self.ports else None
        self.random = np.random.default_rng(seed)

    def act(self, observations, episode_start):
        """Return an action for each row; ``observations`` are arrays by the name of the input.

        Of a Dict or Tuple of actions it returns the arrays by the name of the output.
        """
        inputs = {n: np.asarray(x, self.ports[n]["dtype"]) for n, x in observations.items()}
        if self.state is not None:
            inputs |= {"state": self.state, "episode_start": np.asarray(episode_start, bool)}
        for name, port in self.ports.items():
            if "distribution" in port:
                normal = port["distribution"] == "normal"
                draw = self.random.standard_normal if normal else self.random.random
                inputs[name] = draw(self.zeros(port).shape, np.float32)
        outputs = dict(zip(self.names, self.session.run(self.names, inputs), strict=True))
        self.state = outputs.pop("next_state", None)
        return outputs.get("action", outputs)


if __name__ == "__main__":
    policy = Policy(sys.argv[1], rows=2)
    seen = {n: policy.zeros(p) for n, p in policy.ports.items() if n.startswith("observation")}
    print(policy.act(seen, episode_start=[True, True]))
