from paceline.parallel.cost import Cost
def hybrid_cost(shape, axes, work, config):
    return Cost(0,0,0)
