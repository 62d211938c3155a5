"""Run the policy in ./deployed with NumPy and ONNX Runtime alone (sampled: deploy_onnx_any.py)."""

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("deployed/policy.onnx")
outputs = [port.name for port in session.get_outputs()]
given = {}  # three observations; a policy with memory also has a state
for port in session.get_inputs():
    dtype = port.type[len("tensor(") : -1]  # ONNX's names are NumPy's but for these two
    dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    given[port.name] = np.zeros((3, *port.shape[1:]), dtype)
for step in range(5):
    given |= {"episode_start": np.full(3, step == 0)} if "episode_start" in given else {}
    result = dict(zip(outputs, session.run(outputs, given), strict=True))
    given |= {"state": result.pop("next_state")} if "state" in given else {}
    print({name: action.tolist() for name, action in result.items()})
    # Put the next observations into `given` here.
