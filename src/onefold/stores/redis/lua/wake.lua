-- Tell those who wait for the end of this record. Each of them has subscribed to its key as a channel, on this server.
-- Without permission for either command nobody is told: those who wait look by themselves.
local function wake()
  local subscribed = redis.pcall('PUBSUB', 'NUMSUB', KEYS[1])
  if (subscribed[2] or 0) > 0 then
    redis.pcall('PUBLISH', KEYS[1], '')
  end
end
