"""From an admitted request to a stream of tokens, over as many decode workers as it takes.

dispatcher  admission, limits, one Job per request            (implements gateway.generation.Dispatcher)
job         one request over its attempts: follow, fail over, end
placement   route and submit until some worker accepts
connection  the long-lived stream to one decode worker
output      what came out so far: contiguous, without repeats  (implements gateway.generation.Generation)
loads       what this gateway has on its way to each worker
speeds      for how long a worker's measured speed is believed
"""
