"""The one cost model: seconds, bytes, dollars and requests of a plan; and the types of its arrays.

After FuncPipe (Liu et al., Proc. ACM Meas. Anal. Comput. Syst. 6(3), 2022), section 3, whose chain of layers is widened
here to any graph, with recomputation, wire formats, request prices and shared links added; docs/planning.md derives it.
Plans, the exact search, the solvers' coefficients and the other policies are all priced by this folder alone:

- `loads`: what the formulas are given, element by element: every function takes arrays with one element for each stage;
- `formulas`: seconds of each lane of each stage, peak bytes of its function, and all `stage_costs` together;
- `sync_time`, `sync_ways`: how long the ways of synchronising take, for one gradient and for those of all stages;
- `stores`: requests, bytes and dollars by store, and links to them;
- `pipeline`: from stages to the seconds and dollars of an iteration;
- `evaluate`: all of it for one plan.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
