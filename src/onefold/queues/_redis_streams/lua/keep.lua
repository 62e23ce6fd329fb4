-- Reset the idle time of entries, so that no other consumer claims them: only of those that this consumer still has.
-- KEYS: stream. ARGV: group, consumer, how many deliveries to count, ids.
-- Returns a number for each id: its deliveries; 0 if it is not this consumer's; -1 if it is not in the stream any more.
local stream, group, consumer, more = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local kept = {}
for at = 4, #ARGV do
  local id = ARGV[at]
  local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
  if not pending then
    -- A claim of what was deleted settles it. Whoever has not heard the answer asks again: it is nobody's then.
    local is_gone = #redis.call('XPENDING', stream, group, id, id, 1) == 0 and #redis.call('XRANGE', stream, id, id) == 0
    kept[#kept + 1] = is_gone and -1 or 0
  else
    local count = pending[4] + more
    local claimed = redis.call('XCLAIM', stream, group, consumer, 0, id, 'RETRYCOUNT', count, 'JUSTID')
    kept[#kept + 1] = #claimed == 0 and -1 or count
  end
end
return kept
