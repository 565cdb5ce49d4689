"""Which options the plans of a window may need, found with few labels: those that are alike are merged into one.

A merged label is no worse than any of those that it stands for. So what bounds its completions bounds theirs, and if no
path of merged labels with an option in it is worth keeping, no plan with that option is. With few labels for each node
this takes little time however many plans there are; it finds no plans, but often that there are none, or that a few
options are left, among which labels need not be merged. This is a relaxed decision diagram (Bergman, Cire, van Hoeve
and Hooker, "Discrete Optimization with Decision Diagrams", INFORMS Journal on Computing 28(1), 2016).

By hand: two labels of a node, 4 s for 1 $ and 5 s for 0.5 $, are merged into one of 4 s for 0.5 $. If 4 s and 0.5 $ are
too much for every option in front of them, none of these options is needed behind either label.
"""

import numpy as np

from funcpipe.partitioner.cost import BoolArray, IntArray
from funcpipe.partitioner.search.alike import alike, merged
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.promising import Promising
from funcpipe.partitioner.search.time_window import TimeWindow


def needed_options(window: TimeWindow, incumbents: Incumbents, *, labels: int) -> BoolArray:
    """The options of the window without which some plan better than the incumbents may not do.

    A plan whose own stages do better in other ways of synchronising does not count. At most so many `labels` are kept
    of each node, or one for each number of stages.
    """
    network = window.network
    promising = Promising.of(window, incumbents, ends=False)
    at_node, links = [promising.of_end()], [(np.empty(0, dtype=np.int64),) * 3]
    for node in range(1, network.start + 1):
        found = promising.at(node, at_node)
        group = alike(found, promising.bounds, node, labels)
        links.append((found.option, found.parent, group))
        at_node.append(merged(found, group) if len(found) else found)
    return _on_paths(network.options.after, [len(labels) for labels in at_node], links)


def _on_paths(after: IntArray, counts: list[int], links: list[tuple[IntArray, IntArray, IntArray]]) -> BoolArray:
    """Which options are on a path from a label at the start.

    `links` has for each node the options in front of their labels, the labels behind these, and the groups they are in.
    """
    needed = np.zeros(len(after), dtype=bool)
    reached = [np.zeros(count, dtype=bool) for count in counts]
    reached[-1][:] = True
    for node in reversed(range(1, len(links))):
        option, parent, group = links[node]
        used = reached[node][group]
        needed[option[used]] = True
        for behind in np.unique(after[option[used]]):
            reached[behind][parent[used & (after[option] == behind)]] = True
    return needed
