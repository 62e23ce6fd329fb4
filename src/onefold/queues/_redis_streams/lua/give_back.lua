-- Let other consumers claim entries that this consumer has.
-- KEYS: stream. ARGV: group, consumer, and for each entry its id, its idle time, and how many deliveries do not count.
-- Returns the ids of entries that are not in the stream any more.
local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local gone = {}
for at = 3, #ARGV, 3 do
  local id, idle, less = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
  if pending then
    local count = math.max(pending[4] - less, 0)
    local claimed = redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', idle, 'RETRYCOUNT', count, 'JUSTID')
    if #claimed == 0 then
      gone[#gone + 1] = id
    end
  end
end
return gone
