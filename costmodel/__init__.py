"""What things cost: analytic prices, collectives, memory, and the simulator. Never imports torch."""

if __name__ != "autopiper.costmodel":
    raise ImportError("import this as autopiper.costmodel, not as costmodel: the folder is linked into the package")

from autopiper.costmodel.fold import predict, predict_folded
from autopiper.costmodel.price import price
from autopiper.costmodel.simulate import simulate

__all__ = ["predict", "predict_folded", "price", "simulate"]
